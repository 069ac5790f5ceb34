// What every view needs to know: the bank as it was last heard of, and what happens after a change.

import * as api from "./api.js";
import { nameOf, setClasses } from "./classes.js";
import { notify } from "./dom.js";

const ROLES_THAT_CHANGE = ["expert", "admin"];

let known = null;
let askedWho = false; // once is enough
const watchers = new Set();

/** Asks for the state of the bank and tells everyone who watches it. */
export async function refreshBank() {
  known = await api.bank();
  setClasses(known.classes);
  for (const watch of watchers) watch(known);
  return known;
}

export function watchBank(watch) {
  watchers.add(watch);
}

export function bank() {
  return known;
}

/** Whether this user may veto, relabel and roll back. */
export function mayChange() {
  return ROLES_THAT_CHANGE.includes(known.role);
}

/** Tells that a change was made, and offers to take it back. */
export function announce(text, position) {
  if (!known.who && !askedWho) {
    askedWho = true;
    notify("Nobody knows who made this change.", { name: "Say who", run: () => document.getElementById("who").click() });
  }
  notify(text, { name: "Undo", run: () => takeBack(position) });
}

/** Takes one change back. */
export async function takeBack(position) {
  try {
    await api.undo(position, `Undo of the change at position ${position}`);
    notify(`The change at position ${position} was taken back.`);
  } catch (error) {
    notify(error.message);
  }
}

/** Tells the bank what a query really is: its row gets that label, and the guard learns whom to trust. */
export async function teach(answer, label, why) {
  const decides = await tellGuard(answer, label, why);
  if (answer.joined !== null) {
    const row = await api.row(answer.joined);
    if (row.label !== label) {
      const { position } = await api.relabel([row.id], label, why);
      announce(`Row ${row.id} is now labeled ${nameOf(label)}.`, position);
      return;
    }
  }
  if (!decides) throw new Error(`The bank says ${nameOf(label)} already; there is nothing to correct.`);
  notify(`Noted: it is ${nameOf(label)}.`);
}

/** Whether the label decides between the frozen and the adapted answer; if so, it is noted. */
async function tellGuard(answer, label, why) {
  if (!answer.frozen) return false;
  try {
    await api.feedback(answer.query, label, why);
    return true;
  } catch (refusal) {
    if (refusal.code === "conflict") return false; // both say the same by now
    throw refusal;
  }
}

const WITHOUT_REASON = "Say why in a few words, so that others can follow.";

/** The reason in a form; throws a sentence if there is none. */
export function reasonIn(form) {
  const field = form.elements.why;
  const why = field.value.trim();
  field.setAttribute("aria-invalid", String(!why));
  if (why) return why;
  field.focus();
  throw new Error(WITHOUT_REASON);
}
