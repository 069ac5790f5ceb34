// The start of the page: which view is shown, who looks at it, and news from the server.

import { answersView } from "./answers.js";
import * as api from "./api.js";
import { changesView } from "./changes.js";
import { atMostEvery, element, fill, notify, open } from "./dom.js";
import { counted, whole } from "./format.js";
import { mapView } from "./map.js";
import { questionsView } from "./questions.js";
import { verb } from "./row.js";
import { bank, refreshBank, watchBank } from "./session.js";
import { streamView } from "./stream.js";

const VIEWS = {
  answers: answersView,
  questions: questionsView,
  stream: streamView,
  map: mapView,
  changes: changesView,
};
const TITLES = { answers: "Answers", questions: "Questions", stream: "Stream", map: "Map", changes: "Changes" };

const main = document.getElementById("main");
let shown = null;
let shownName = "";

/** Shows the view that the address names, such as #/answers/q-17. */
function route() {
  if (location.hash === "#main") {
    main.focus();
    return;
  }
  const [, name = "answers", rest = ""] = location.hash.split("/");
  const known = name in VIEWS ? name : "answers";
  const id = rest ? decodeURIComponent(rest) : null;
  if (known === shownName && shown?.go) {
    shown.go(id);
    return;
  }
  shown?.leave();
  const first = !shown;
  shownName = known;
  shown = VIEWS[known](main, id);
  document.title = `${TITLES[known]} · adanpc`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${known}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!first) main.focus({ preventScroll: true });
}

function showBank(known) {
  const parts = [
    counted(known.rows, "row"),
    `${whole(known.source_rows)} source`,
    `${whole(known.stream_rows)} joined`,
    `${whole(known.vetoed_rows)} vetoed`,
    `position ${whole(known.position)}`,
  ];
  fill(document.getElementById("summary"), parts.map((part) => element("span", {}, part)));
  document.getElementById("alarm").hidden = !known.signs?.alarm;
  document.getElementById("who").textContent = known.who || "Who are you?";
}

function askForToken(refusal) {
  const dialog = document.getElementById("token-dialog");
  const form = document.getElementById("token-form");
  document.getElementById("token-error").textContent = refusal;
  dialog.addEventListener("cancel", (event) => event.preventDefault()); // nothing can be shown without a token
  dialog.showModal();
  return new Promise((resume) => {
    form.addEventListener("submit", () => {
      api.setToken(form.elements.token.value.trim());
      form.reset();
      resume();
    }, { once: true });
  });
}

/** Asks who someone is, or, where tokens say so, whether to use another one. */
function askWho() {
  if (api.hasToken()) {
    document.getElementById("token-holder").textContent = `${bank().who}, with the role ${bank().role}`;
    open(document.getElementById("holder-dialog"));
    return;
  }
  document.getElementById("who-form").elements.name.value = api.ownName();
  open(document.getElementById("who-dialog"));
}

document.getElementById("who").addEventListener("click", askWho);
document.getElementById("holder-form").addEventListener("submit", () => {
  api.forgetToken();
  location.reload();
});
document.getElementById("who-form").addEventListener("submit", async (event) => {
  api.setOwnName(event.target.elements.name.value.trim());
  await refreshBank();
});

let wasConnected = true;

function showConnection(connected) {
  const place = document.getElementById("connection");
  const text = connected ? "Live" : "Reconnecting";
  if (place.textContent !== text) place.textContent = text;
  place.classList.toggle("off", !connected);
  if (connected && !wasConnected) {
    // What happened in between was not heard.
    refreshSoon();
    shown.hear("change", {});
  }
  wasConnected = connected;
}

const refreshSoon = atMostEvery(1000, async () => {
  try {
    await refreshBank();
  } catch {
    showConnection(false); // the next event comes when the server is back
  }
});

function hear(kind, data) {
  refreshSoon();
  shown.hear(kind, data);
  const byOther = kind === "change" && data.who && data.who !== bank().who;
  if (byOther) notify(whatHappened(data));
}

function whatHappened({ who, kind, rows }) {
  if (kind === "rollback") return `${who} rolled the bank back.`;
  if (kind === "feedback") return `${who} said what a query was.`;
  return `${who} ${verb(kind)} ${counted(rows, "row")}.`;
}

// A file that misses the place for it would be opened by the browser instead of this page.
for (const kind of ["dragover", "drop"]) {
  addEventListener(kind, (event) => event.preventDefault());
}

async function start() {
  api.onTokenNeeded(askForToken);
  watchBank(showBank);
  try {
    await refreshBank();
  } catch (error) {
    fill(main, element("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  addEventListener("hashchange", route);
  route();
  await api.listen(hear, showConnection);
}

start();
