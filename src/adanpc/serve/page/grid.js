// Points of a plane in cells, so that the one nearest to a click is found without looking at all of them.

const POINTS_IN_A_CELL = 8;
const CROOKED = 2; // a step to the right may go up or down, but not by more than this times as far

export class Grid {
  /** Sorts points into cells. */
  constructor(x, y) {
    this.x = x;
    this.y = y;
    this.rangeX = extent(x);
    this.rangeY = extent(y);
    this.side = Math.max(1, Math.ceil(Math.sqrt(x.length / POINTS_IN_A_CELL)));
    const cells = this.side * this.side;
    this.starts = new Uint32Array(cells + 1); // where the points of each cell begin in `order`
    this.order = new Uint32Array(x.length);
    const cellOf = new Uint32Array(x.length);
    for (let place = 0; place < x.length; place += 1) {
      const cell = this.row(y[place]) * this.side + this.column(x[place]);
      cellOf[place] = cell;
      this.starts[cell + 1] += 1;
    }
    for (let cell = 0; cell < cells; cell += 1) this.starts[cell + 1] += this.starts[cell];
    const next = this.starts.slice();
    for (let place = 0; place < x.length; place += 1) {
      this.order[next[cellOf[place]]] = place;
      next[cellOf[place]] += 1;
    }
  }

  column(x) {
    return cellAlong(x, this.rangeX, this.side);
  }

  row(y) {
    return cellAlong(y, this.rangeY, this.side);
  }

  /** The place of the point nearest to a spot within a radius, or -1. */
  nearest(x, y, radius) {
    let best = -1;
    let least = radius * radius;
    for (let row = this.row(y - radius); row <= this.row(y + radius); row += 1) {
      for (let column = this.column(x - radius); column <= this.column(x + radius); column += 1) {
        const cell = row * this.side + column;
        for (let place = this.starts[cell]; place < this.starts[cell + 1]; place += 1) {
          const point = this.order[place];
          const squared = (this.x[point] - x) ** 2 + (this.y[point] - y) ** 2;
          if (squared <= least) {
            best = point;
            least = squared;
          }
        }
      }
    }
    return best;
  }

  /** The place of the nearest point in a direction from another, or -1 if there is none. */
  toward(from, dx, dy) {
    let best = -1;
    let least = Infinity;
    for (let point = 0; point < this.x.length; point += 1) {
      const right = this.x[point] - this.x[from];
      const up = this.y[point] - this.y[from];
      const along = right * dx + up * dy;
      const across = Math.abs(right * dy) + Math.abs(up * dx);
      if (along <= 0 || across > CROOKED * along) continue;
      const squared = right * right + up * up;
      if (squared < least) {
        best = point;
        least = squared;
      }
    }
    return best;
  }
}

/** The lowest and the highest of some numbers. */
export function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return values.length ? [low, high] : [0, 0];
}

function cellAlong(value, [low, high], side) {
  if (!(high > low)) return 0;
  const cell = Math.floor((side * (value - low)) / (high - low));
  return Math.min(side - 1, Math.max(0, cell));
}
