// One answer, taken apart: its probabilities, the rows that voted, and what it would be without some of them.

import * as api from "./api.js";
import { classSelect, mark, nameOf, tag } from "./classes.js";
import { atMostEvery, element, fill, moveByArrows, showError } from "./dom.js";
import { ORIGINS, cosine, counted, percent } from "./format.js";
import { picture } from "./pictures.js";
import { openRow } from "./row.js";
import { announce, mayChange, reasonIn, teach } from "./session.js";

const MOST_BARS = 10; // classes that are shown; the others are added up
const FIRST_CARDS = 15; // rows that are shown at first; those with small shares are behind a button

/** Shows an answer in a place of the page until it is left. */
export function workbench(place, id) {
  const error = element("p", { class: "error", role: "alert", hidden: true });
  const content = element("div", { class: "bench-content", "aria-busy": "true" });
  fill(place, element("a", { class: "back", href: "#/answers" }, "← All answers"), error, content);

  let given = null; // the answer as it was given
  let now = null; // as it would be now
  let trial = null; // as it would be without the rows that are ticked off
  const without = new Set();
  const cards = new Map();
  let showsAll = false;
  let running = null; // the newest preview; older ones are of no interest

  const head = element("div", { class: "bench-head" });
  const bars = element("ul", { class: "bars", "aria-label": "Probabilities" });
  const grid = element("ul", { class: "neighbors", "aria-labelledby": "voters" });
  const more = element("button", { type: "button", class: "more", hidden: true, onclick: () => showAll() });
  const silenced = element("div", {});
  const trialBar = element("div", { class: "trial", hidden: true });

  async function load() {
    try {
      given = await api.query(id);
      now = await api.preview(id, []);
      keepKnown();
      trial = without.size ? await api.preview(id, [...without]) : null;
    } catch (problem) {
      showError(error, problem);
      content.removeAttribute("aria-busy");
      return;
    }
    error.hidden = true;
    if (!content.children.length) build();
    draw();
    content.removeAttribute("aria-busy");
  }

  /** Somebody else may have vetoed what is ticked off here. */
  function keepKnown() {
    const voting = new Set(now.neighbors.map((neighbor) => neighbor.id));
    for (const row of without) {
      if (!voting.has(row)) without.delete(row);
    }
  }

  function build() {
    const hint = mayChange()
      ? "Untick a row to see the answer without it. Click its picture to correct its label."
      : "Untick a row to see the answer without it.";
    fill(
      content,
      head,
      bars,
      element("div", { class: "heading" }, element("h2", { id: "voters" }, "Rows that vote"), element("p", { class: "hint" }, hint)),
      grid,
      more,
      trialBar,
      silenced,
      mayChange() && correction(given),
    );
    grid.addEventListener("change", (event) => tick(Number(event.target.value), event.target.checked));
  }

  function draw() {
    fill(head, headOf(given, now));
    drawBars(bars, now, trial);
    drawCards();
    drawTrialBar();
    fill(silenced, silencedRows(given));
  }

  async function tick(row, votes) {
    if (votes) without.delete(row);
    else without.add(row);
    running?.abort();
    running = new AbortController();
    const { signal } = running;
    try {
      const answer = without.size ? await api.preview(id, [...without], { signal }) : null;
      if (signal.aborted) return;
      trial = answer;
      error.hidden = true;
      drawBars(bars, now, trial);
      drawCards();
      drawTrialBar();
    } catch (problem) {
      if (problem.name !== "AbortError") showError(error, problem);
    }
  }

  /** The rows that vote now, then those that would move up; cards that stay keep the focus. */
  function drawCards() {
    const shown = new Map(now.neighbors.map((neighbor) => [neighbor.id, neighbor]));
    for (const neighbor of trial?.neighbors ?? []) {
      if (!shown.has(neighbor.id)) shown.set(neighbor.id, neighbor);
    }
    const shares = new Map((trial ?? now).neighbors.map((neighbor) => [neighbor.id, neighbor.share]));
    const voting = new Set(now.neighbors.map((neighbor) => neighbor.id));
    const largest = Math.max(...shares.values());
    for (const [row, card] of cards) {
      if (shown.has(row)) continue; // it still votes, or would
      card.item.remove();
      cards.delete(row);
    }
    const folded = fold(shown, voting);
    for (const [row, neighbor] of shown) {
      if (!cards.has(row)) cards.set(row, cardOf(neighbor));
      const card = cards.get(row);
      card.update(neighbor, shares.get(row) ?? 0, largest, !without.has(row), !voting.has(row));
      if (!card.item.isConnected) grid.append(card.item);
    }
    more.hidden = !folded;
    more.textContent = `Show ${counted(folded, "more row")}`;
    if (!shown.size) fill(grid, element("li", { class: "empty" }, "No row may vote: the bank has no active rows."));
    moveByArrows(grid, ".neighbor", "button, input");
  }

  /** Leaves out voting rows with small shares, unless all are wanted or they were seen before; gives their number. */
  function fold(shown, voting) {
    if (showsAll) return 0;
    const behind = [...shown.keys()].slice(FIRST_CARDS).filter((row) => voting.has(row) && !cards.has(row));
    for (const row of behind) shown.delete(row);
    return behind.length;
  }

  function showAll() {
    showsAll = true;
    const next = grid.children.length;
    drawCards();
    grid.children[next]?.querySelector("input").focus();
  }

  function drawTrialBar() {
    const wasHidden = trialBar.hidden;
    trialBar.hidden = !without.size;
    if (!without.size || !trial) return;
    if (wasHidden) fill(trialBar, trialForm());
    const before = element("span", {}, tag(now.label), ` ${percent(now.confidence)}`);
    const after = element("span", {}, tag(trial.label), ` ${percent(trial.confidence)}`);
    fill(trialBar.querySelector(".outcome"), `Without ${counted(without.size, "row")}: `, before, " → ", after);
    const button = trialBar.querySelector("button.primary");
    if (button) button.textContent = `Veto ${counted(without.size, "row")}`;
  }

  function trialForm() {
    const problem = element("p", { class: "error", role: "alert", hidden: true });
    const reset = element("button", { type: "button", onclick: untickNothing }, "Reset");
    const form = element("form", { class: "line-form" });
    if (mayChange()) {
      form.append(
        element("label", { for: "veto-why" }, "Why should they not vote?"),
        element("input", { id: "veto-why", name: "why", autocomplete: "off", maxlength: 500 }),
        element("div", { class: "actions" }, reset, element("button", { type: "submit", class: "primary" }, "Veto")),
        problem,
      );
    } else {
      form.append(reset);
    }
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      confirmVeto(form, problem);
    });
    return [element("p", { class: "outcome", role: "status" }), form];
  }

  async function confirmVeto(form, problem) {
    const rows = [...without];
    try {
      const { position } = await api.veto(rows, reasonIn(form));
      announce(`Vetoed ${counted(rows.length, "row")}.`, position);
      without.clear();
      await load();
      grid.querySelector("input")?.focus();
    } catch (refusal) {
      showError(problem, refusal);
    }
  }

  function untickNothing() {
    without.clear();
    trial = null;
    drawBars(bars, now, trial);
    drawCards();
    drawTrialBar();
    grid.querySelector("input")?.focus();
  }

  const reload = atMostEvery(1000, load);
  load();
  return {
    id,
    hear(kind) {
      // Queries that join may vote here, too, but rows that move while someone looks at them help nobody.
      if (kind === "change") reload();
    },
    leave() {
      running?.abort();
    },
  };
}

function headOf(given, now) {
  const facts = [fact("Confidence", percent(now.confidence))];
  if (percent(given.confidence) !== percent(now.confidence)) facts.push(fact("When it was asked", percent(given.confidence)));
  if (now.trust !== null) facts.push(fact("Trust in adaptation", percent(now.trust)));
  if (now.novelty !== null) facts.push(fact("Novelty", percent(now.novelty)));
  if (now.frozen) facts.push(fact("Without adaptation", ...frozenAnswer(now.frozen)));
  facts.push(fact("Joined the bank", given.joined === null ? "no" : `as row ${given.joined}`));
  return [
    picture(given.picture, `The image of ${given.query}`, given.query, now.label),
    element(
      "div",
      { class: "bench-facts" },
      element("h2", { class: "verdict" }, tag(now.label)),
      changedSince(given, now),
      element("dl", { class: "facts" }, facts),
    ),
  ];
}

function fact(name, ...value) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, ...value));
}

function frozenAnswer(probs) {
  const label = probs.indexOf(Math.max(...probs));
  return [tag(label), ` ${percent(probs[label])}`];
}

/** A sentence if the answer would be another one now. */
function changedSince(given, now) {
  if (given.label === now.label) return null;
  const before = element("span", { class: "unbroken" }, tag(given.label), ` (${percent(given.confidence)}).`);
  const after = element("span", { class: "unbroken" }, tag(now.label), ".");
  return element("p", { class: "since" }, "When it was asked, the answer was ", before, " What changed in the bank since then made it ", after);
}

function drawBars(list, now, trial) {
  const shown = trial ?? now;
  const labels = now.probs.map((_, label) => label);
  labels.sort((one, other) => now.probs[other] - now.probs[one] || one - other);
  const first = labels.slice(0, MOST_BARS);
  // The class that would win is shown in any case.
  if (!first.includes(shown.label)) first[first.length - 1] = shown.label;
  const items = first.map((label) => bar(label, shown.probs[label], trial ? now.probs[label] : null));
  const rest = labels.length - first.length;
  if (rest > 0) {
    const sum = first.reduce((total, label) => total - shown.probs[label], 1);
    items.push(element("li", { class: "faint" }, `${counted(rest, "other class", "other classes")}: ${percent(Math.max(0, sum))}`));
  }
  fill(list, items);
}

function bar(label, probability, before) {
  const filled = element("span", { class: `filled class-${label % 8}` });
  filled.style.width = `${100 * probability}%`;
  const track = element("span", { class: "track", "aria-hidden": "true" }, filled);
  if (before !== null) {
    const tick = element("span", { class: "before" });
    tick.style.left = `${100 * before}%`;
    track.append(tick);
  }
  const change = before !== null && percent(before) !== percent(probability) && element("span", { class: "faint" }, `was ${percent(before)}`);
  return element("li", {}, element("span", { class: "bar-name" }, tag(label)), track, element("span", { class: "number" }, percent(probability)), element("span", { class: "was" }, change));
}

/** A neighbor with its checkbox, and a function that updates both. */
function cardOf(neighbor) {
  const row = neighbor.id;
  const facts = element("div", { class: "card-facts" });
  const share = element("span", { class: "share-filled" });
  const votes = element("input", { type: "checkbox", value: row, id: `votes-${row}`, checked: true });
  const shareText = element("span", { class: "number" });
  const opener = element(
    "button",
    { type: "button", class: "open-row", "aria-label": `Open row ${row}`, onclick: () => openRow(row) },
    picture(neighbor.picture, "", `row ${row}`, neighbor.label),
  );
  const item = element(
    "li",
    { class: "neighbor", "data-row": row },
    opener,
    facts,
    element("label", { class: "votes", for: `votes-${row}` }, votes, element("span", {}, "Votes"), element("span", { class: "unseen" }, ` row ${row}, ${neighbor.name}`), shareText),
    element("span", { class: "share-track", "aria-hidden": "true" }, share),
  );
  function update(current, part, largest, isVoting, movesUp) {
    votes.checked = isVoting;
    item.classList.toggle("off", !isVoting);
    shareText.textContent = isVoting ? percent(part) : "–";
    share.className = `share-filled class-${current.label % 8}`;
    share.style.width = isVoting && largest > 0 ? `${(100 * Math.max(0, part)) / largest}%` : "0";
    fill(
      facts,
      element("span", { class: "line" }, tag(current.label), element("span", { class: `origin ${current.origin}` }, ORIGINS[current.origin])),
      element("span", { class: "line faint" }, "row", element("span", { class: "number" }, String(row))),
      element("span", { class: "line faint" }, "similarity", element("span", { class: "number" }, cosine(current.similarity))),
      movesUp && element("span", { class: "moves-up" }, "would move up"),
    );
  }
  return { item, update };
}

/** The rows that voted when it was asked and were vetoed since. */
function silencedRows(given) {
  const vetoed = given.neighbors.filter((neighbor) => neighbor.vetoed);
  if (!vetoed.length) return [];
  const items = vetoed.map((neighbor) => {
    const opener = element("button", { type: "button", onclick: () => openRow(neighbor.id) }, mark(neighbor.label), ` Row ${neighbor.id}, ${nameOf(neighbor.label)}`);
    return element("li", {}, opener);
  });
  return [
    element("h2", {}, "Vetoed since it was asked"),
    element("p", { class: "hint" }, "These rows voted then and may no longer. Open one to see who decided so, and to restore it."),
    element("ul", { class: "chips", "data-vetoed": "" }, items),
  ];
}

/** A form that says what the right answer is, where that can change something. */
function correction(given) {
  const frozenDiffers = given.frozen && given.frozen.indexOf(Math.max(...given.frozen)) !== given.label;
  if (given.joined === null && !frozenDiffers) return null;
  const effect = given.joined === null
    ? "It tells the guard whether to trust what the bank has learned."
    : `This query joined the bank as row ${given.joined}. What you say becomes the label of that row.`;
  const problem = element("p", { class: "error", role: "alert", hidden: true });
  const form = element(
    "form",
    { class: "correction" },
    element("h2", {}, "Do you know the right answer?"),
    element("p", { class: "hint" }, effect),
    element("div", { class: "fields" },
      element("label", { for: "right-label" }, "It is"),
      classSelect("right-label", given.label),
      element("label", { for: "right-why" }, "How do you know?"),
      element("input", { id: "right-why", name: "why", autocomplete: "off", maxlength: 500 }),
      element("button", { type: "submit" }, "Tell the bank"),
    ),
    problem,
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await teach(given, Number(form.elements.label.value), reasonIn(form));
      problem.hidden = true;
      form.elements.why.value = "";
    } catch (refusal) {
      showError(problem, refusal);
    }
  });
  return form;
}
