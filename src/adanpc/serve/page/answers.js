// The view of answers: drop an image or pick an answer that was given, and look at who voted for it.

import * as api from "./api.js";
import { nameOf, tag } from "./classes.js";
import { atMostEvery, element, fill, moveByArrows, showError } from "./dom.js";
import { moment, percent } from "./format.js";
import { picture } from "./pictures.js";
import { bank } from "./session.js";
import { workbench } from "./workbench.js";

const SHOWN = 50; // answers in the list
const ORDERS = { latest: "Latest", uncertain: "Least certain" };

let order = "latest"; // kept when another view is opened in between

/** Shows the view in a place of the page; `id` is the answer that is open, if any. */
export function answersView(place, id) {
  const list = element("ol", { class: "answer-list", "aria-label": "Answers" });
  const listError = element("p", { class: "error", role: "alert", hidden: true });
  const bench = element("section", { class: "bench", "aria-label": "The answer" });
  const side = element("div", { class: "side" }, dropZone(), orderChoice(() => refresh()), listError, list);
  fill(place, element("h1", { class: "unseen" }, "Answers"), element("div", { class: "answers" }, side, bench));

  let open = null;
  async function refresh() {
    try {
      const { queries } = await api.queries(order, SHOWN);
      listError.hidden = true;
      fillList(list, queries, open?.id);
    } catch (error) {
      showError(listError, error);
    }
  }
  const refreshSoon = atMostEvery(1000, refresh);

  function go(next) {
    open?.leave();
    open = null;
    place.firstElementChild.nextElementSibling.classList.toggle("has-open", Boolean(next));
    for (const link of list.querySelectorAll("a")) {
      link.setAttribute("aria-current", String(link.dataset.query === next));
    }
    if (next) open = workbench(bench, next);
    else fill(bench, emptyBench());
  }

  go(id);
  refresh();
  return {
    go,
    hear(kind, data) {
      refreshSoon();
      open?.hear(kind, data);
    },
    leave() {
      open?.leave();
    },
  };
}

function emptyBench() {
  const send = bank().encoder ? "Drop an image, or pick an answer from the list" : "Pick an answer from the list";
  return element("p", { class: "empty" }, `${send}, to see the rows that voted for it.`);
}

function fillList(list, queries, open) {
  if (!queries.length) {
    const text = bank().encoder
      ? "Nothing has been asked since the server started. Drop an image above to begin."
      : "Nothing has been asked since the server started. Send features to /v1/predict to begin.";
    fill(list, element("li", { class: "empty" }, text));
    return;
  }
  const focused = document.activeElement?.dataset?.query;
  fill(list, queries.map((answer) => element("li", {}, answerLink(answer, open))));
  moveByArrows(list, "a");
  // The list is made anew while someone moves in it by keys: the focus stays on the same answer.
  if (focused) list.querySelector(`a[data-query="${CSS.escape(focused)}"]`)?.focus();
}

function answerLink(answer, open) {
  const what = [
    element("span", { class: "line" }, tag(answer.label), element("span", { class: "number" }, percent(answer.confidence))),
    element("span", { class: "line faint" }, moment(answer.time), element("span", {}, answer.joined === null ? "did not join" : "joined")),
  ];
  return element(
    "a",
    { href: `#/answers/${encodeURIComponent(answer.query)}`, "data-query": answer.query, "aria-current": String(answer.query === open) },
    picture(answer.picture, "", answer.query, answer.label),
    element("span", { class: "lines" }, what),
  );
}

function orderChoice(changed) {
  const choices = Object.entries(ORDERS).map(([value, text]) => {
    const choose = () => {
      order = value;
      changed();
    };
    const input = element("input", { type: "radio", name: "order", value, checked: value === order, onchange: choose });
    return element("label", {}, input, text);
  });
  return element("fieldset", { class: "choice" }, element("legend", { class: "unseen" }, "Order of the list"), choices);
}

function dropZone() {
  if (!bank().encoder) {
    return element("p", { class: "hint" }, "This server has no encoder, so it takes features and no images: send them to /v1/predict.");
  }
  const error = element("p", { class: "error", role: "alert", hidden: true });
  const input = element("input", { type: "file", accept: "image/*", multiple: true, class: "unseen", id: "image-file" });
  const learn = element("input", { type: "checkbox", id: "learn" });
  const zone = element(
    "div",
    { class: "drop" },
    input,
    element("label", { for: "image-file", class: "button" }, "Choose an image"),
    element("span", { class: "drop-hint" }, "or drop it here"),
    element("label", { class: "check" }, learn, "The bank may learn from it"),
    error,
  );
  const send = (files) => ask(files, learn.checked, zone, error);
  input.addEventListener("change", () => send(input.files));
  zone.addEventListener("dragover", (event) => {
    event.preventDefault();
    zone.classList.add("over");
  });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    send(event.dataTransfer.files);
  });
  return zone;
}

async function ask(files, adapt, zone, error) {
  error.hidden = true;
  zone.setAttribute("aria-busy", "true");
  try {
    let newest = null;
    for (const file of files) {
      const { answers } = await api.predict(file, adapt);
      newest = answers.at(-1).query;
    }
    if (newest) location.hash = `#/answers/${encodeURIComponent(newest)}`;
  } catch (problem) {
    showError(error, problem);
  }
  zone.removeAttribute("aria-busy");
}

/** An answer in a few words, for people who hear the page. */
export function inWords(answer) {
  return `${nameOf(answer.label)}, ${percent(answer.confidence)}`;
}
