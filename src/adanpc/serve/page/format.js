// Numbers, times and names as people read them.

const WHOLE = new Intl.NumberFormat("en-US");
const CLOCK = new Intl.DateTimeFormat("en-US", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat("en-US", { year: "numeric", month: "short", day: "numeric" });

/** 12,345 */
export function whole(number) {
  return WHOLE.format(number);
}

/** "1 row", "2 rows"; `plural` for nouns that need another one. */
export function counted(number, noun, plural = `${noun}s`) {
  return `${whole(number)} ${number === 1 ? noun : plural}`;
}

const UNBROKEN = "\u00a0"; // a space at which no line ends

/** 0.123 as "12 %"; what is below one percent and above zero as "< 1 %". */
export function percent(share) {
  if (share === null || share === undefined) return "–";
  if (share > 0 && share < 0.01) return `<${UNBROKEN}1${UNBROKEN}%`;
  return `${Math.round(100 * share)}${UNBROKEN}%`;
}

/** A cosine with three digits. */
export function cosine(similarity) {
  return similarity.toFixed(3);
}

/** The time of the day, with the date unless it is today's; seconds since 1970. */
export function moment(seconds) {
  if (!seconds) return "";
  const date = new Date(1000 * seconds);
  if (Number.isNaN(date.getTime())) return String(seconds); // outside of the calendar
  const today = DAY.format(new Date()) === DAY.format(date);
  return today ? CLOCK.format(date) : `${DAY.format(date)}, ${CLOCK.format(date)}`;
}

export const ORIGINS = {
  source: "source",
  admitted: "joined",
  expert: "expert",
};
