// One row of the bank in a dialog: what it is, what happened to it, and what an expert can do about it.

import * as api from "./api.js";
import { classSelect, nameOf, tag } from "./classes.js";
import { element, fill, open, showError } from "./dom.js";
import { ORIGINS, moment, percent } from "./format.js";
import { picture } from "./pictures.js";
import { announce, mayChange, reasonIn } from "./session.js";

const VERBS = {
  append: "added",
  veto: "vetoed",
  restore: "restored",
  relabel: "relabeled",
  delete: "deleted",
  rollback: "rolled back",
};

/** What a change did, as a verb. */
export function verb(kind) {
  return VERBS[kind] ?? kind;
}

/** Opens the dialog of a row. */
export async function openRow(id) {
  const dialog = document.getElementById("row-dialog");
  fill(dialog, element("h2", { id: "row-title" }, `Row ${id}`), element("p", { class: "hint" }, "Loading"));
  open(dialog);
  await refresh(dialog, id);
}

async function refresh(dialog, id) {
  try {
    const row = await api.row(id);
    fill(dialog, closeButton(), element("h2", { id: "row-title" }, `Row ${id}`), details(row), mayChange() && judgment(dialog, row), history(row));
  } catch (error) {
    fill(dialog, closeButton(), element("h2", { id: "row-title" }, `Row ${id}`), element("p", { class: "error", role: "alert" }, error.message));
  }
}

function closeButton() {
  return element("button", { type: "button", class: "quiet close cancel", "aria-label": "Close" }, "×");
}

function details(row) {
  const facts = [
    ["Label", tag(row.label)],
    ["Origin", ORIGINS[row.origin]],
    ["State", row.vetoed ? "vetoed: it does not vote" : "votes"],
  ];
  if (row.origin === "admitted") facts.push(["Confidence when it joined", percent(row.confidence)]);
  if (row.key !== null) facts.push(["Key", String(row.key)]);
  if (row.domain !== null) facts.push(["Domain", String(row.domain)]);
  const list = facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  return element(
    "div",
    { class: "row-details" },
    picture(row.picture, `The picture of row ${row.id}`, `row ${row.id}`, row.label),
    element("dl", { class: "facts" }, list),
  );
}

/** The form in which an expert corrects, vetoes or restores the row. */
function judgment(dialog, row) {
  const problem = element("p", { class: "error", role: "alert", hidden: true });
  const silence = row.vetoed ? "Restore" : "Veto";
  const form = element(
    "form",
    { class: "judgment" },
    element("label", { for: "row-label" }, "Label"),
    classSelect("row-label", row.label),
    element("label", { for: "row-why" }, "Why?"),
    element("input", { id: "row-why", name: "why", autocomplete: "off", maxlength: 500 }),
    problem,
    element(
      "div",
      { class: "actions" },
      element("button", { type: "button", class: "silence", onclick: () => act(changeVoting) }, silence),
      element("button", { type: "submit", class: "primary" }, "Correct the label"),
    ),
  );

  async function changeVoting(why) {
    const change = row.vetoed ? api.restore : api.veto;
    const { position } = await change([row.id], why);
    announce(`${row.vetoed ? "Restored" : "Vetoed"} row ${row.id}.`, position);
  }

  async function changeLabel(why) {
    const label = Number(form.elements.label.value);
    if (label === row.label) throw new Error(`Row ${row.id} is already labeled ${nameOf(label)}; choose another class.`);
    const { position } = await api.relabel([row.id], label, why);
    announce(`Row ${row.id} is now labeled ${nameOf(label)}.`, position);
  }

  async function act(change) {
    try {
      await change(reasonIn(form));
      await refresh(dialog, row.id);
      dialog.querySelector(".close").focus();
    } catch (refusal) {
      showError(problem, refusal);
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act(changeLabel);
  });
  return form;
}

function history(row) {
  if (!row.history.length) return element("p", { class: "hint" }, "Nobody has changed this row.");
  const items = row.history.map((entry) => {
    const who = entry.who || "someone";
    const what = entry.kind === "relabel" ? `, which was ${nameOf(entry.label)} before` : "";
    return element(
      "li",
      {},
      element("span", { class: "line" }, `${who} ${verb(entry.kind)} it${what}`, element("span", { class: "faint" }, moment(entry.when))),
      entry.why && element("span", { class: "why" }, entry.why),
    );
  });
  return element("div", { class: "history" }, element("h3", {}, "History"), element("ul", {}, items));
}
