// The view of changes: who did what to the bank, when and why; undo, and the way back to an earlier position.

import * as api from "./api.js";
import { tag } from "./classes.js";
import { atMostEvery, element, fill, notify, open, showError } from "./dom.js";
import { counted, moment, whole } from "./format.js";
import { openRow, verb } from "./row.js";
import { bank, mayChange, reasonIn, takeBack } from "./session.js";

const AT_ONCE = 200; // entries that are asked for
const IDS_SHOWN = 5;
const KINDS = { expert: "By people", all: "All" };

let kind = "expert"; // kept when another view is opened in between

/** Shows the view in a place of the page. */
export function changesView(place) {
  const list = element("ol", { class: "log", "aria-label": "Changes, the newest first" });
  const error = element("p", { class: "error", role: "alert", hidden: true });
  const older = element("button", { type: "button", hidden: true, onclick: () => more() }, "Older changes");
  fill(
    place,
    element(
      "section",
      { class: "column" },
      element("div", { class: "heading" }, element("h1", {}, "Changes"), kindChoice(() => refresh())),
      element("p", { class: "hint" }, "Everything that changed the bank, the newest first. To undo something or to roll back is one more change, so nothing is lost."),
      error,
      list,
      older,
    ),
  );

  let entries = [];
  let before = null; // where older entries begin
  async function load(from) {
    try {
      const answer = await api.log({ before: from, limit: AT_ONCE, kind });
      error.hidden = true;
      before = answer.before;
      older.hidden = before === null;
      return answer.entries;
    } catch (problem) {
      showError(error, problem);
      return [];
    }
  }
  async function refresh() {
    entries = await load(null);
    draw();
  }
  async function more() {
    entries = [...entries, ...(await load(before))];
    draw();
  }
  function draw() {
    if (!entries.length) {
      const text = kind === "expert"
        ? "Nobody has changed anything yet. Veto a row in an answer, or correct its label, and it is listed here."
        : "Nothing has changed since the bank was created.";
      fill(list, element("li", { class: "empty" }, text));
      return;
    }
    fill(list, folded(entries).map(entryItem));
  }
  const refreshSoon = atMostEvery(1000, refresh);
  refresh();
  return {
    hear(event) {
      if (event === "change") refreshSoon();
    },
    leave() {},
  };
}

function kindChoice(changed) {
  const choices = Object.entries(KINDS).map(([value, text]) => {
    const choose = () => {
      kind = value;
      changed();
    };
    return element("label", {}, element("input", { type: "radio", name: "kind", value, checked: value === kind, onchange: choose }), text);
  });
  return element("fieldset", { class: "choice" }, element("legend", { class: "unseen" }, "Which changes"), choices);
}

/** The entries, with rows that joined one after another as one entry. */
function folded(entries) {
  const result = [];
  for (const entry of entries) {
    const last = result.at(-1);
    if (entry.kind === "append" && !entry.who && last?.kind === "append" && !last.who) {
      last.rows += entry.rows;
      last.folded += 1;
    } else {
      result.push({ ...entry, folded: 1 });
    }
  }
  return result;
}

function entryItem(entry) {
  const buttons = [];
  if (mayChange() && entry.undoable) {
    const undo = element("button", { type: "button", onclick: () => takeBack(entry.position), "aria-label": `Undo the change at position ${entry.position}` }, "Undo");
    buttons.push(undo);
  }
  if (mayChange() && entry.kind === "rollback" && entry.position > bank().log_start) {
    const undo = element("button", { type: "button", onclick: () => openRollback(entry.position - 1), "aria-label": `Undo the rollback at position ${entry.position}` }, "Undo…");
    buttons.push(undo);
  }
  if (mayChange() && entry.position < bank().position && entry.position >= bank().log_start) {
    const back = element(
      "button",
      { type: "button", class: "quiet", onclick: () => openRollback(entry.position), "aria-label": `Roll back to position ${entry.position}` },
      "Roll back to here…",
    );
    buttons.push(back);
  }
  return element(
    "li",
    { class: `entry ${entry.kind}`, "data-position": entry.position },
    element("span", { class: "position", title: "position" }, whole(entry.position)),
    element(
      "div",
      { class: "entry-text" },
      element("p", {}, ...sentence(entry)),
      entry.why && element("p", { class: "why" }, entry.why),
      element("p", { class: "faint" }, moment(entry.when)),
    ),
    element("div", { class: "entry-actions" }, buttons),
  );
}

/** What happened, as a sentence with links to the rows. */
function sentence(entry) {
  if (entry.kind === "append" && !entry.who) {
    const joined = entry.rows === 1 ? "1 answered query joined" : `${whole(entry.rows)} answered queries joined`;
    return [entry.rows ? `${joined} the bank.` : "Queries were answered; none joined."];
  }
  const who = element("strong", {}, entry.who || "Someone");
  if (entry.kind === "rollback") return [who, ` rolled the bank back to position ${whole(entry.to)}.`];
  if (entry.kind === "feedback") {
    return [who, " said that a query was ", tag(entry.label), "; with what was learned it was ", tag(entry.adapted), ", without ", tag(entry.frozen), "."];
  }
  const parts = [who, ` ${verb(entry.kind)} `, ...rowLinks(entry)];
  if (entry.kind === "relabel") parts.push(" as ", ...labelTags(entry.label));
  return [...parts, "."];
}

/** The label that all rows got, or one for each of the rows that are shown. */
function labelTags(label) {
  if (!Array.isArray(label)) return [tag(label)];
  const parts = [];
  label.slice(0, IDS_SHOWN).forEach((each, place) => {
    if (place) parts.push(", ");
    parts.push(tag(each));
  });
  if (label.length > IDS_SHOWN) parts.push(", …");
  return parts;
}

function rowLinks(entry) {
  const ids = entry.ids ?? [];
  if (!ids.length) return [counted(entry.rows, "row")];
  const parts = [entry.rows === 1 ? "row " : "rows "];
  ids.slice(0, IDS_SHOWN).forEach((id, place) => {
    if (place) parts.push(", ");
    parts.push(element("button", { type: "button", class: "link", onclick: () => openRow(id) }, String(id)));
  });
  const rest = entry.rows - Math.min(ids.length, IDS_SHOWN);
  if (rest > 0) parts.push(` and ${whole(rest)} more`);
  return parts;
}

/** Shows what a rollback would change, and carries it out if that is wanted. */
export async function openRollback(to) {
  const dialog = document.getElementById("rollback-dialog");
  const title = element("h2", { id: "rollback-title" }, `Roll back to position ${whole(to)}`);
  fill(dialog, title, element("p", { class: "hint" }, "Looking at what that would change"));
  open(dialog);
  try {
    const effect = await api.previewRollback(to);
    fill(dialog, title, ...effectOf(effect), rollbackForm(dialog, to));
  } catch (error) {
    fill(dialog, title, element("p", { class: "error", role: "alert" }, error.message), element("div", { class: "actions" }, cancel()));
  }
}

function cancel() {
  return element("button", { type: "button", class: "cancel" }, "Cancel");
}

function effectOf(effect) {
  const facts = [
    [effect.changes, "change taken back", "changes taken back"],
    [effect.rows_leaving, "row leaves", "rows leave"],
    [effect.rows_returning, "row returns", "rows return"],
    [effect.labels_changing, "label changes", "labels change"],
    [effect.vetoes_changing, "veto changes", "vetoes change"],
  ];
  const tiles = facts.map(([count, one, several]) => {
    const name = count === 1 ? one : several;
    return element("div", {}, element("dt", {}, name), element("dd", {}, whole(count)));
  });
  const counts = element("dl", { class: "counts" }, tiles);
  if (!effect.queries.length) {
    return [counts, element("p", { class: "hint" }, "None of the recent answers would change.")];
  }
  const items = effect.queries.map(({ query, before, after }) =>
    element("li", {}, element("span", { class: "faint" }, query), tag(before), element("span", { "aria-label": "becomes" }, "→"), tag(after)),
  );
  return [
    counts,
    element("h3", {}, `${counted(effect.queries.length, "recent answer")} would change`),
    element("ul", { class: "becoming", tabindex: 0, "aria-label": "Answers that would change" }, items),
  ];
}

function rollbackForm(dialog, to) {
  const problem = element("p", { class: "error", role: "alert", hidden: true });
  const form = element(
    "form",
    {},
    element("label", { for: "rollback-why" }, "Why?"),
    element("input", { id: "rollback-why", name: "why", autocomplete: "off", maxlength: 500 }),
    problem,
    element("div", { class: "actions" }, cancel(), element("button", { type: "submit", class: "primary" }, "Roll back")),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const { position } = await api.rollback(to, reasonIn(form));
      dialog.close();
      notify(`The bank is as it was at position ${whole(to)}.`, { name: "Undo…", run: () => openRollback(position - 1) });
    } catch (refusal) {
      showError(problem, refusal);
    }
  });
  return form;
}
