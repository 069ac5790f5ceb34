// The view of questions: the few recent queries whose labels would settle whether to adapt.

import * as api from "./api.js";
import { classNames, mark, nameOf, otherClass, tag } from "./classes.js";
import { atMostEvery, element, fill, moveByArrows, showError } from "./dom.js";
import { picture } from "./pictures.js";
import { mayChange, teach } from "./session.js";

const REASON = "Answered in the list of questions";
const MOST_BUTTONS = 8; // classes with a button each; with more, the two answers have buttons, and a list has the others

/** Shows the view in a place of the page. */
export function questionsView(place) {
  const error = element("p", { class: "error", role: "alert", hidden: true });
  const list = element("ul", { class: "questions" });
  fill(
    place,
    element(
      "section",
      { class: "column" },
      element("h1", {}, "Questions"),
      element("p", { class: "hint" }, "What the bank has learned changed its answers to these queries. Say what they really are: that tells the guard which answers to trust, and corrects the rows that these queries became."),
      error,
      list,
    ),
  );

  const answered = new Set(); // what was answered here is not asked again
  async function refresh() {
    // A list that changes under the fingers invites wrong answers.
    if (list.contains(document.activeElement)) return;
    try {
      const { questions } = await api.ask();
      error.hidden = true;
      draw(questions.filter((question) => !answered.has(question.query)));
    } catch (problem) {
      showError(error, problem);
    }
  }
  function draw(questions) {
    if (!questions.length) {
      fill(list, element("li", { class: "empty" }, "No open questions: on all recent queries, the answers with and without what was learned agree, or you have answered them."));
      return;
    }
    fill(list, questions.map((question) => questionItem(question, done)));
    for (const choices of list.querySelectorAll(".choices")) moveByArrows(choices, "button, select");
  }
  function done(question) {
    answered.add(question.query);
    const item = list.querySelector(`[data-query="${CSS.escape(question.query)}"]`);
    const next = item.nextElementSibling ?? item.previousElementSibling;
    item.remove();
    const focus = next?.querySelector("button");
    if (focus) focus.focus();
    else refresh();
  }
  const refreshSoon = atMostEvery(10_000, refresh); // the server looks at hundreds of queries for it
  refresh();
  return {
    hear() {
      refreshSoon();
    },
    leave() {},
  };
}

function questionItem(question, done) {
  const problem = element("p", { class: "error", role: "alert", hidden: true });
  const answers = element(
    "dl",
    { class: "facts" },
    element("div", {}, element("dt", {}, "With what it learned"), element("dd", {}, tag(question.adapted_label))),
    element("div", {}, element("dt", {}, "Without"), element("dd", {}, tag(question.frozen_label))),
  );
  const link = element(
    "a",
    { href: `#/answers/${encodeURIComponent(question.query)}`, "aria-label": `Open ${question.query}` },
    picture(question.picture, "", question.query, question.adapted_label),
  );
  const text = element("div", { class: "question-text" }, element("h2", { id: `what-${question.query}` }, "What is it?"), answers);
  if (mayChange()) text.append(choicesOf(question, done, problem));
  return element("li", { "data-query": question.query }, link, text, problem);
}

function choicesOf(question, done, problem) {
  async function say(label) {
    try {
      await teach(question, label, REASON);
      done(question);
    } catch (refusal) {
      showError(problem, refusal);
    }
  }
  const labels = [...classNames().keys()];
  const either = [question.adapted_label, question.frozen_label];
  const few = labels.length <= MOST_BUTTONS;
  const buttons = (few ? labels : either).map((label) =>
    element("button", { type: "button", onclick: () => say(label) }, mark(label), nameOf(label)),
  );
  const others = !few && otherClass(labels.filter((label) => !either.includes(label)), say);
  return element("div", { class: "choices", role: "group", "aria-labelledby": `what-${question.query}` }, buttons, others);
}
