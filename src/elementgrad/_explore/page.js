// The explorer's front end: one ES module, without a build step. `mount` puts it into an element, with a function that
// asks the session. It is the page of the server, which has the names in it, and the widget of a notebook.

// Elements, of which `options` has the attributes or is the class. Names and labels of the user's are text and never
// markup.
const make = (tag, options = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(typeof options === "string" ? { className: options } : options)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && !key.startsWith("aria")) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

const makeTable = (heads, rows) => make("table", {},
  make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
  make("tbody", {}, ...rows));

// Numbers: the shortest text from which the same float32 or float64 is read back.
const show = (value, narrow) => {
  if (typeof value === "string") return value;
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (Object.is(value, -0)) return "-0";
  if (!narrow) return String(value);
  for (let digits = 1; digits < 9; digits += 1) {
    const text = value.toPrecision(digits);
    if (Math.fround(Number(text)) === value) return String(Number(text));
  }
  return String(Number(value.toPrecision(9)));
};
const brief = (value) => {
  if (typeof value !== "number") return value;
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(3)));
};
const bytes = (text) => {  // a loop, since a picture of 224 x 224 has more than a megabyte
  const signs = atob(text), array = new Uint8Array(signs.length);
  for (let at = 0; at < signs.length; at += 1) array[at] = signs.charCodeAt(at);
  return array.buffer;
};
const decode = (text, narrow) => (narrow ? new Float32Array(bytes(text)) : new Float64Array(bytes(text)));
const sameIndex = (left, right) => !!left && !!right && left.length === right.length && left.every((n, i) => n === right[i]);
const sameElement = (left, right) => !!left && !!right && left.tensor === right.tensor && sameIndex(left.index, right.index);
const times = (shape) => shape.join(" × ") || "one number";
const limit = (value, low, high) => Math.max(low, Math.min(high, value));

// Colours from the most negative through zero to the most positive, in 511 steps.
const makeColours = (stops) => {
  const parts = stops.map((stop) => [1, 3, 5].map((at) => parseInt(stop.slice(at, at + 2), 16)));
  return Array.from({ length: 511 }, (_, step) => {
    const at = (step / 510) * (parts.length - 1), low = Math.min(Math.floor(at), parts.length - 2);
    return parts[low].map((part, i) => Math.round(part + (parts[low + 1][i] - part) * (at - low)));
  });
};
const hex = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));

// Questions whose failure is shown where their answer would be.
const SHOWN_IN_PLACE = ["tensor", "gradient", "shares"];

const KEYS = [
  ["/", "search the names"], ["Arrow keys", "move in the tree or in a picture"], ["Enter", "choose the element or name"],
  ["+  −  0", "zoom a picture in, out, and back"], ["f", "zoom to the framed field"],
  ["Page Up, Page Down", "other channels of a picture"],
  ["Shift + arrows", "move a zoomed picture"], ["s", "take the tensor in the middle as the source"],
  ["t", "make the chosen source element the target"], ["w", "walk back to the strongest driver in the layer before"],
  ["[  ]", "back and forward"], [",  .", "previous and next example"], ["e", "explain"], ["c", "copy as code"],
  ["r", "download the report"], ["Esc", "cancel a read, or close this"],
];

// One picture of a tensor: tiles of cells on a canvas, with its slices, zoom, colour scale and the number under the
// pointer. `options`: label, onWindow (ask for another window), onPick (an element was chosen).
class Picture {
  constructor(app, options) {
    Object.assign(this, { app, options, data: null, row: null, view: {}, mode: "overlay", mixed: [0, 0, 0] });
    Object.assign(this, { cursor: null, marked: null, field: null });
    this.canvas = make("canvas", {
      tabIndex: 0, role: "application", "aria-roledescription": "picture of a tensor", className: "eg-canvas",
    });
    this.chips = make("div", { className: "eg-chips", role: "group", "aria-label": "Tokens" });
    this.tools = make("div", "eg-tools");
    this.readout = make("output", { className: "eg-readout", "aria-live": "polite" });
    this.scale = make("div", "eg-scale");
    this.notes = make("p", "eg-notes");
    this.stage = make("div", "eg-stage", this.canvas);
    const parts = [this.tools, this.chips, this.stage, this.readout, this.scale, this.notes];
    this.element = make("div", "eg-picture", ...parts);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.cursor = null; this.paint(); this.read(); });
    this.canvas.addEventListener("pointerdown", (event) => { this.grip = { x: event.clientX, y: event.clientY }; });
    this.canvas.addEventListener("pointerup", (event) => this.release(event));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.cursor = this.hit(event) || this.cursor;
      this.zoom(event.deltaY < 0 ? 1 : -1);
    }, { passive: false });
  }

  // `data` is the session's answer to "view".
  set(row, data, view) {
    const sameTensor = this.row === row;
    Object.assign(this, { row, data, view });
    const [tiles, rows, columns] = data.cells;
    this.size = { tiles, rows, columns };
    this.values = decode(data.values, data.narrow);
    this.gradient = data.gradient ? decode(data.gradient, data.narrowGradient) : null;
    this.positions = data.positions ? new Int32Array(bytes(data.positions)) : null;
    if (!sameTensor) { this.cursor = null; this.field = null; }
    if (this.cursor && (this.cursor.t >= tiles || this.cursor.r >= rows || this.cursor.c >= columns)) this.cursor = null;
    const scale = this.gradient ? data.gradientScale : data.scale;
    const notes = [...data.notes, ...scale.notes];
    if (this.composite && tiles > 1) {
      notes.push(this.gradient ? `at each pixel the largest gradient of ${tiles} channels` : `${tiles} channels in one picture`);
    }
    if (this.row.layout.kind === "tokens" && this.positions) notes.push("the tokens are those of these numbers");
    this.notes.textContent = notes.map((note) => note[0].toUpperCase() + note.slice(1)).join(". ");
    this.canvas.setAttribute("aria-label", `${this.options.label()}: ${scale.description}. ${notes.join(". ")}`);
    this.makeTools();
    this.makeChips();
    this.resize();
    this.read();
  }

  // There is nothing to draw, for this reason.
  clear(why) {
    Object.assign(this, { data: null, row: null, gradient: null, cursor: null, marked: null, field: null });
    this.app.keepFocus(this.element, () => {
      for (const element of [this.tools, this.chips, this.scale]) element.replaceChildren();
      this.canvas.blur();
      this.canvas.hidden = true;
    });
    this.notes.textContent = "";
    this.readout.textContent = why;
  }

  get composite() { return this.row.layout.kind === "image"; }  // all channels are one picture
  get count() { return this.composite ? 1 : this.size.tiles; }
  at(cell) { return (cell.t * this.size.rows + cell.r) * this.size.columns + cell.c; }

  indexOf(cell) {
    const { window, block } = this.data, { tile, row, column } = this.row.layout, index = [...window.index];
    const position = this.positions ? this.positions[this.at(cell)] : 0;
    if (tile !== null) index[tile] = window.tiles[0] + cell.t;
    if (row !== null) index[row] = window.rows[0] + cell.r * block[0] + Math.floor(position / block[1]);
    if (column !== null) index[column] = window.columns[0] + cell.c * block[1] + (position % block[1]);
    return index;
  }

  cellOf(index) {
    if (!index || !this.data || index.length !== this.row.shape.length) return null;
    const { window, block } = this.data, { tile, row, column, fixed, example } = this.row.layout;
    const others = example === null ? fixed : [...fixed, example];
    if (others.some((axis) => index[axis] !== window.index[axis])) return null;
    const cell = {
      t: tile === null ? 0 : index[tile] - window.tiles[0],
      r: row === null ? 0 : Math.floor((index[row] - window.rows[0]) / block[0]),
      c: column === null ? 0 : Math.floor((index[column] - window.columns[0]) / block[1]),
    };
    const { tiles, rows, columns } = this.size;
    return cell.t >= 0 && cell.t < tiles && cell.r >= 0 && cell.r < rows && cell.c >= 0 && cell.c < columns ? cell : null;
  }

  // Whether the number of a cell is that of an element, and not a larger one beside it.
  hasExactly(index) {
    const cell = this.cellOf(index);
    return !!cell && sameIndex(this.indexOf(cell), index);
  }

  // Of a picture of several channels, the channel with the largest gradient at a pixel.
  strongest(cell) {
    if (!this.composite || !this.gradient) return cell;
    return { ...cell, t: this.strongestChannel(cell.r * this.size.columns + cell.c, cell.t) };
  }

  strongestChannel(pixel, best = 0) {
    const { tiles, rows, columns } = this.size, area = rows * columns;
    const size = (t) => {
      const slope = Math.abs(this.gradient[t * area + pixel]);
      return Number.isNaN(slope) ? Infinity : slope;
    };
    for (let t = 0; t < tiles; t += 1) if (size(t) > size(best)) best = t;
    return best;
  }

  resize() {
    if (!this.data) return;
    const { rows, columns } = this.size, kind = this.row.layout.kind, { count } = this;
    // The stage has room for the ring of the focus on each side.
    const width = Math.max(120, (this.stage.clientWidth || 326) - 6), height = this.options.height();
    this.bars = rows === 1 && count === 1;
    const gap = count > 1 ? 6 : 0;
    let across = 1, side = 0, rowsOfTiles = Infinity;
    if (this.bars) {
      const wide = Math.min(width, columns * 72);
      this.geometry = { across: 1, gap: 0, width: wide, height: columns === 1 ? 64 : 200, cell: [wide / columns, 0] };
    } else {
      for (let tried = 1; tried <= count; tried += 1) {
        const down = Math.ceil(count / tried);
        const cell = Math.min((width - gap * (tried - 1)) / tried / columns, (height - gap * (down - 1)) / down / rows, 44);
        if (cell > side || (cell === side && down < rowsOfTiles)) { side = cell; across = tried; rowsOfTiles = down; }
      }
      // Tiles that would be too small to be hit are as large as that, and the stage scrolls.
      if (count > 1 && side * Math.min(rows, columns) < 30) {
        side = 30 / Math.min(rows, columns);
        across = Math.max(1, Math.floor((width + gap) / (side * columns + gap)));
      }
      if (side > 2) side = Math.floor(side);
      const down = Math.ceil(count / across), cell = [side, side];
      // Cells of a long strip are drawn out across it, or its rows could not be hit.
      if (count === 1 && !this.composite) {
        if (side * rows < 96) cell[1] = Math.max(side, Math.min(16, height / rows));
        if (side * columns < 96) cell[0] = Math.max(side, Math.min(16, width / columns));
      }
      this.geometry = {
        across, gap, cell,
        width: across * (cell[0] * columns + gap) - gap, height: down * (cell[1] * rows + gap) - gap,
      };
    }
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.max(1, Math.round(this.geometry.width * ratio));
    this.canvas.height = Math.max(1, Math.round(this.geometry.height * ratio));
    this.canvas.style.width = `${this.geometry.width}px`;
    this.canvas.style.height = `${this.geometry.height}px`;
    this.canvas.hidden = kind === "tokens" && this.row.layout.row === null;
    this.ratio = ratio;
    this.bitmaps = null;
    this.paint();
  }

  colour(value, end) {
    if (Number.isNaN(value)) return this.app.nonfinite.NaN;
    if (!Number.isFinite(value)) return value > 0 ? this.app.nonfinite["+inf"] : this.app.nonfinite["-inf"];
    return this.app.colours[Math.round(limit(value / end, -1, 1) * 255) + 255];
  }

  // What is drawn. Only of images and maps would one see the values under a gradient.
  get drawn() {
    if (!this.gradient) return "values";
    return this.mode === "overlay" && !this.layered ? "gradient" : this.mode;
  }
  get layered() { return ["image", "maps"].includes(this.row.layout.kind); }

  // The colour of a cell of a tile. Under a gradient the values are grey, so that all colour is that of the gradient,
  // and only as dark (or in a dark page as light) as lets its strongest colours stand out. There are many cells: the
  // array that is returned is that of the next one, too.
  shade(t, pixel) {
    const { scale, gradientScale } = this.data, { mixed } = this, area = this.size.rows * this.size.columns;
    const channels = this.composite && this.size.tiles >= 3 ? 3 : 1, span = scale.highest - scale.lowest || 1;
    let odd = null, sum = 0;
    for (let channel = 0; channel < channels; channel += 1) {
      const value = this.values[(t + channel) * area + pixel], part = limit((value - scale.lowest) / span, 0, 1);
      if (!Number.isFinite(value)) odd = value;
      mixed[channel] = 255 * part;
      sum += part;
    }
    if (this.drawn === "values") {
      if (odd !== null || !this.composite) return this.colour(odd ?? this.values[t * area + pixel], scale.limit);
      if (channels === 1) mixed.fill(mixed[0]);
      return mixed;
    }
    const slope = this.gradient[(this.composite ? this.strongestChannel(pixel) : t) * area + pixel];
    const over = this.colour(slope, gradientScale.limit);
    if (this.drawn === "gradient" || !Number.isFinite(slope)) return over;
    const [low, high] = this.app.greys, grey = low + ((high - low) * sum) / channels, under = odd === null ? null : this.colour(odd, 1);
    const weight = Math.sqrt(limit(Math.abs(slope) / gradientScale.limit, 0, 1));
    for (let i = 0; i < 3; i += 1) mixed[i] = (under ? under[i] : grey) * (1 - weight) + over[i] * weight;
    return mixed;
  }

  makeBitmaps() {
    const { rows, columns } = this.size;
    return Array.from({ length: this.count }, (_, t) => {
      const image = new ImageData(columns, rows);
      for (let pixel = 0; pixel < rows * columns; pixel += 1) {
        const colour = this.shade(t, pixel);
        for (let i = 0; i < 3; i += 1) image.data[4 * pixel + i] = colour[i];
        image.data[4 * pixel + 3] = 255;
      }
      const bitmap = make("canvas", { width: columns, height: rows });
      bitmap.getContext("2d").putImageData(image, 0, 0);
      return bitmap;
    });
  }

  origin(t) {
    const { across, gap, cell } = this.geometry, { rows, columns } = this.size, at = this.composite ? 0 : t;
    return [(at % across) * (cell[0] * columns + gap), Math.floor(at / across) * (cell[1] * rows + gap)];
  }

  paint() {
    if (!this.data || this.canvas.hidden) return;
    const context = this.canvas.getContext("2d"), { cell } = this.geometry, { rows, columns } = this.size;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.geometry.width, this.geometry.height);
    context.imageSmoothingEnabled = false;
    if (this.bars) this.paintBars(context);
    else {
      this.bitmaps = this.bitmaps || this.makeBitmaps();
      this.bitmaps.forEach((bitmap, t) => context.drawImage(bitmap, ...this.origin(t), columns * cell[0], rows * cell[1]));
    }
    this.paintField(context);
    this.outline(context, this.cellOf(this.marked), 2.5);
    this.outline(context, this.cursor, 1.5);
  }

  paintBars(context) {
    const { cell: [cell], width, height } = this.geometry, { columns } = this.size;
    const slopes = this.drawn !== "values", numbers = slopes ? this.gradient : this.values;
    const scale = slopes ? this.data.gradientScale : this.data.scale, end = scale.limit;
    let top = 0, bottom = 0;
    for (const value of numbers.filter(Number.isFinite)) {
      top = Math.max(top, Math.min(value, end));
      bottom = Math.max(bottom, Math.min(-value, end));
    }
    const space = this.row.labels && cell > 12 ? 18 : 2;
    const unit = (height - space - 2) / (top + bottom || 1), zero = 1 + top * unit;
    context.fillStyle = this.app.style("--eg-line");
    context.fillRect(0, zero - 0.5, width, 1);
    for (let c = 0; c < columns; c += 1) {
      const value = numbers[c], isFinite = Number.isFinite(value), part = limit(value / end, -1, 1);
      const size = Math.max(1, Math.abs(part) * end * unit), margin = cell > 3 ? 1 : 0, wide = Math.max(0.75, cell - 2 * margin);
      const [red, green, blue] = this.colour(isFinite ? Math.sign(part) * end * (0.4 + 0.6 * Math.abs(part)) : value, end);
      context.fillStyle = `rgb(${red} ${green} ${blue})`;
      const [y, tall] = isFinite ? [part < 0 ? zero : zero - size, size] : [1, height - space - 2];
      if (value !== 0) context.fillRect(c * cell + margin, y, wide, tall);
    }
    if (space === 2) return;
    Object.assign(context, { fillStyle: this.app.style("--eg-faint"), font: "12px system-ui, sans-serif", textAlign: "center" });
    for (let c = 0; c < columns; c += 1) {
      const index = this.indexOf({ t: 0, r: 0, c });
      context.fillText(this.app.start.labels[index[this.row.layout.column]], (c + 0.5) * cell, height - 4, cell - 2);
    }
  }

  // Rectangles are drawn twice, dark on light, so that they stand out from any colour, and within the canvas.
  frame(context, x, y, width, height, thickness, colour) {
    const margin = thickness / 2 + 1, left = Math.max(x, margin), top = Math.max(y, margin);
    const right = Math.min(x + width, this.geometry.width - margin), bottom = Math.min(y + height, this.geometry.height - margin);
    for (const [wide, stroke] of [[thickness + 2, this.app.style("--eg-paper")], [thickness, colour]]) {
      Object.assign(context, { lineWidth: wide, strokeStyle: stroke });
      context.strokeRect(left, top, right - left, bottom - top);
    }
  }

  outline(context, cell, thickness) {
    if (!cell) return undefined;
    const { cell: [across, down], height } = this.geometry, ink = this.app.style("--eg-ink"), wide = Math.max(across, 3);
    if (this.bars) return this.frame(context, cell.c * across, 1, wide, height - 2, thickness, ink);
    const [x, y] = this.origin(cell.t);
    return this.frame(context, x + cell.c * across, y + cell.r * down, wide, Math.max(down, 3), thickness, ink);
  }

  paintField(context) {
    if (!this.field || !this.gradient) return;
    const { tile, row, column, fixed, example } = this.row.layout, { window, block } = this.data;
    const { rows, columns } = this.size, { count } = this;
    const has = (axis, position) => axis === null || (position >= this.field[axis][0] && position < this.field[axis][1]);
    if (![...fixed, example].every((axis) => has(axis, window.index[axis]))) return;
    const ends = (axis, start, step, cells) => {
      return axis === null ? [0, cells] : this.field[axis].map((end) => limit((end - start) / step, 0, cells));
    };
    const [top, bottom] = ends(row, window.rows[0], block[0], rows);
    const [left, right] = ends(column, window.columns[0], block[1], columns);
    if (bottom <= top || right <= left) return;
    const [across, down] = this.geometry.cell, thickness = count > 12 ? 1 : 2, colour = this.app.style("--eg-field");
    const width = Math.max(2, (right - left) * across - 2);
    for (let t = 0; t < count; t += 1) {
      if (!this.composite && !has(tile, window.tiles[0] + t)) continue;
      if (this.bars) {
        this.frame(context, left * across + 1, 2, width, this.geometry.height - 4, thickness, colour);
      } else {
        const [x, y] = this.origin(t), height = Math.max(2, (bottom - top) * down - 2);
        this.frame(context, x + left * across + 1, y + top * down + 1, width, height, thickness, colour);
      }
    }
  }

  hit(event) {
    if (!this.data) return null;
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const { across, gap, cell } = this.geometry, { rows, columns } = this.size, { count } = this;
    if (this.bars) return { t: 0, r: 0, c: limit(Math.floor(x / cell[0]), 0, columns - 1) };
    // Between two tiles, the cell that is nearest: what looks like a part of the picture must not be deaf.
    const nearest = (at, cells, side, tiles) => {
      const tile = limit(Math.floor((at + gap / 2) / (cells * side + gap)), 0, tiles - 1);
      return [tile, limit(Math.floor((at - tile * (cells * side + gap)) / side), 0, cells - 1)];
    };
    const [i, c] = nearest(x, columns, cell[0], across), [j, r] = nearest(y, rows, cell[1], Math.ceil(count / across));
    const t = j * across + i;
    return t < count ? this.strongest({ t, r, c }) : null;
  }

  hover(event) {
    this.cursor = this.hit(event);
    this.canvas.style.cursor = this.cursor ? "" : "default";
    this.paint();
    this.read();
  }

  release(event) {
    const from = this.grip, to = this.hit(event);
    this.grip = null;
    if (!from || !this.data) return;
    const moved = [event.clientX - from.x, event.clientY - from.y];
    if (Math.hypot(...moved) > 6 && this.zoomed) {
      const cells = moved.map((distance, axis) => -Math.round(distance / (this.geometry.cell[axis] || Infinity)));
      this.pan(cells[1] * this.data.block[0], cells[0] * this.data.block[1]);
    } else if (to && Math.hypot(...moved) <= 6) this.pick(to);
  }

  pick(cell) {
    this.canvas.focus({ preventScroll: true });
    this.options.onPick(this.indexOf(cell));
  }

  isPart(rows, columns) {
    const { layout: { row, column }, shape } = this.row, part = (axis, ends) => axis !== null && ends[1] - ends[0] < shape[axis];
    return part(row, rows) || part(column, columns);
  }
  get zoomed() { return this.isPart(this.data.window.rows, this.data.window.columns); }
  get hasSmallField() {
    const { row, column } = this.row.layout;
    return !!this.field && !!this.gradient && this.isPart(this.field[row], this.field[column]);
  }

  pan(down, right) {
    const { window } = this.data, { row, column } = this.row.layout, { shape } = this.row;
    const move = (axis, [start, stop], by) => {
      if (axis === null) return undefined;
      const moved = limit(start + by, 0, shape[axis] - (stop - start));
      return [moved, moved + stop - start];
    };
    this.ask({ rows: move(row, window.rows, down), columns: move(column, window.columns, right) });
  }

  zoom(direction) {
    if (!this.data) return;
    const { window } = this.data, { tile, row, column } = this.row.layout, { shape } = this.row;
    const middle = this.field && this.gradient ? this.field.map(([start, stop]) => (start + stop - 1) >> 1) : null;
    const index = this.cursor ? this.indexOf(this.cursor) : this.cellOf(this.marked) ? this.marked : middle;
    const several = window.tiles[1] - window.tiles[0] > 1 && !this.composite;
    if (direction === 0) return this.ask({ tiles: undefined, rows: undefined, columns: undefined });
    if (direction > 0 && several) {
      const chosen = index && tile !== null ? index[tile] : window.tiles[0];
      return this.turnTo(chosen, chosen + 1);
    }
    if (direction < 0 && !this.zoomed) return this.ask({ tiles: undefined });
    const change = (axis, [start, stop]) => {
      if (axis === null) return undefined;
      const wanted = direction > 0 ? Math.ceil((stop - start) / 2) : 2 * (stop - start);
      const size = limit(wanted, Math.min(2, shape[axis]), shape[axis]);
      const centre = direction > 0 && index ? index[axis] : (start + stop) / 2;
      const first = limit(Math.round(centre - size / 2), 0, shape[axis] - size);
      return size === shape[axis] ? undefined : [first, first + size];
    };
    return this.ask({ rows: change(row, window.rows), columns: change(column, window.columns) });
  }

  // The framed field with a margin around it; `follow` keeps the window with the fields of further targets.
  zoomToField() {
    if (!this.hasSmallField) return;
    const { row, column } = this.row.layout, part = (axis) => {
      if (axis === null) return undefined;
      const [start, stop] = this.field[axis], margin = Math.ceil((stop - start) / 4);
      return [Math.max(0, start - margin), Math.min(this.row.shape[axis], stop + margin)];
    };
    this.ask({ index: this.field.map(([start]) => start), rows: part(row), columns: part(column), follow: true });
  }

  page(direction) {
    const { window } = this.data, { tile } = this.row.layout;
    if (tile === null || this.composite) return;
    const count = window.tiles[1] - window.tiles[0], size = this.row.shape[tile];
    const start = window.tiles[0] + direction * count;
    if (start >= 0 && start < size) this.turnTo(start, Math.min(size, start + count));
  }

  // Show these channels; zooming out again comes to the page that has them.
  turnTo(first, stop) {
    const index = this.data.window.index.map((position, axis) => (axis === this.row.layout.tile ? first : position));
    this.ask({ index, tiles: [first, stop] });
  }

  ask(change) { this.options.onWindow({ ...this.view, follow: false, ...change }); }

  key(event) {
    if (!this.data) return;
    const { rows, columns, tiles } = this.size, { across } = this.geometry;
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key in moves && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      const [down, right] = moves[event.key];
      if (event.shiftKey && this.zoomed) {
        const { block } = this.data;
        return this.pan(down * Math.ceil(rows / 4) * block[0], right * Math.ceil(columns / 4) * block[1]);
      }
      const cell = this.cursor ? { ...this.cursor } : this.cellOf(this.marked) || { t: 0, r: 0, c: 0 };
      if (this.cursor) {
        cell.r += down; cell.c += right;
        const step = cell.c < 0 ? -1 : cell.c >= columns ? 1 : cell.r < 0 ? -across : cell.r >= rows ? across : 0;
        if (step && !this.composite && cell.t + step >= 0 && cell.t + step < tiles) {
          cell.t += step; cell.c = (cell.c + columns) % columns; cell.r = (cell.r + rows) % rows;
        }
        cell.r = limit(cell.r, 0, rows - 1); cell.c = limit(cell.c, 0, columns - 1);
      }
      this.cursor = this.strongest(cell);
      this.paint();
      return this.read();
    }
    const actions = {
      "+": () => this.zoom(1), "=": () => this.zoom(1), "-": () => this.zoom(-1), 0: () => this.zoom(0),
      PageDown: () => this.page(1), PageUp: () => this.page(-1),
    };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.options.onPick(this.indexOf(this.cursor || this.cellOf(this.marked) || { t: 0, r: 0, c: 0 }));
    } else if (event.key in actions && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      event.stopPropagation();
      actions[event.key]();
    }
    return undefined;
  }

  read() {
    if (!this.data) return undefined;
    const cell = this.cursor || this.cellOf(this.marked), { narrow, narrowGradient } = this.data;
    const say = (text) => { this.readout.textContent = text; };
    if (!cell) return say(this.canvas.hidden ? "Choose one of these." : "Point at an element, or move to one with the arrow keys.");
    if (!this.cursor && !this.hasExactly(this.marked)) {
      return say(`${this.app.text(this.row, this.marked)} is one of several numbers in the framed cell; zoom in for it.`);
    }
    const index = this.indexOf(cell), at = this.at(cell), label = this.labelOf(index);
    const parts = [`${this.app.text(this.row, index)} = ${show(this.values[at], narrow)}`];
    if (this.composite && this.size.tiles > 1) {
      const channels = Array.from({ length: this.size.tiles }, (_, t) => show(this.values[this.at({ ...cell, t })], narrow));
      parts.push(`all channels ${channels.join(", ")}`);
    }
    if (this.gradient) parts.push(`gradient ${show(this.gradient[at], narrowGradient)}`);
    if (label) parts.push(label);
    return say(parts.join(" · "));
  }

  labelOf(index) {
    const { start } = this.app, { kind, row, column, example } = this.row.layout;
    const text = kind === "tokens" ? this.texts(example === null ? 0 : index[example])[index[row === null ? column : row]] : null;
    const label = this.row.labels ? start.labels[index[column]] : null;
    return [text, label].filter((part) => part !== null && part !== undefined).map((part) => `“${part}”`).join(" → ");
  }

  texts(example) { return this.app.start.tokens[example] || this.app.start.tokens[0] || []; }

  makeTools() {
    const { window } = this.data, { fixed, tile } = this.row.layout, { shape } = this.row, { focused } = this.app;
    const label = focused && this.tools.contains(focused) ? focused.getAttribute("aria-label") : null;
    const number = (name, axis, value, onchange) => make("label", "eg-axis", `${name} `, make("input", {
      type: "number", min: 0, max: shape[axis] - 1, value, "aria-label": name,
      onchange: (event) => onchange(limit(Math.round(Number(event.target.value) || 0), 0, shape[axis] - 1)),
    }), ` of ${shape[axis]}`);
    const button = (text, name, onclick, disabled = false) => {
      return make("button", { type: "button", title: name, "aria-label": name, disabled, onclick }, text);
    };
    const tools = fixed.filter((axis) => shape[axis] > 1).map((axis) => number(`axis ${axis}`, axis, window.index[axis], (value) => {
      const index = [...window.index];
      index[axis] = value;
      this.ask({ index });
    }));
    if (tile !== null && !this.composite && shape[tile] > 1) {
      const [first, stop] = window.tiles;
      tools.push(make("span", "eg-group",
        button("‹", "previous channels", () => this.page(-1), first === 0),
        stop - first === 1 ? number("channel", tile, first, (value) => this.turnTo(value, value + 1))
          : make("span", {}, `channels ${first}–${stop - 1} of ${shape[tile]}`),
        button("›", "next channels", () => this.page(1), stop >= shape[tile])));
    }
    if (this.gradient && this.layered) {
      const onchange = (event) => { this.mode = event.target.value; this.resize(); this.makeScale(); };
      tools.push(make("select", { "aria-label": "what is drawn", onchange },
        ...["overlay", "gradient", "values"].map((mode) => make("option", { value: mode, selected: mode === this.mode }, mode))));
    }
    if (this.values.length > 1) {
      tools.push(make("span", "eg-group eg-zoom",
        button("+", "zoom in", () => this.zoom(1)), button("−", "zoom out", () => this.zoom(-1)),
        button("⤢", "show all", () => this.zoom(0)),
        this.hasSmallField ? button("▣", "zoom to the field (key f)", () => this.zoomToField()) : null));
    }
    this.tools.replaceChildren(...tools);
    const again = [...this.tools.querySelectorAll("[aria-label]")].find((tool) => tool.getAttribute("aria-label") === label);
    again?.focus();
    this.makeScale();
  }

  makeScale() {
    const slopes = this.drawn !== "values", scale = slopes ? this.data.gradientScale : this.data.scale;
    const strip = make("canvas", { width: 255, height: 1, className: "eg-strip", role: "presentation" });
    const grey = !slopes && this.composite, context = strip.getContext("2d");
    for (let x = 0; x < 255; x += 1) {
      const [red, green, blue] = grey ? [x, x, x] : this.app.colours[2 * x];
      context.fillStyle = `rgb(${red} ${green} ${blue})`;
      context.fillRect(x, 0, 1, 1);
    }
    const [low, middle, high] = grey ? [scale.lowest, "", scale.highest] : [-scale.limit, "0", scale.limit];
    const word = { overlay: "gradient, over the values in grey", gradient: "gradient", values: "value" }[this.drawn];
    this.scale.replaceChildren(make("span", {}, brief(low)), make("span", "eg-ramp", strip, make("span", {}, middle)),
      make("span", {}, brief(high)), make("span", "eg-word", word));
    if (slopes && this.field) this.scale.append(make("span", "eg-key", make("i", "eg-frame"), this.fieldText));
    for (const [kind, count] of Object.entries(scale.nonfinite)) {
      const swatch = make("i", "eg-swatch");
      swatch.style.background = `rgb(${this.app.nonfinite[kind].join(" ")})`;
      this.scale.append(make("span", "eg-key", swatch, `${count} ${kind}`));
    }
  }

  setField(field, exact) {
    this.field = field;
    if (field) {
      const { row, column } = this.row.layout, axes = [row, column].filter((axis) => axis !== null);
      const sizes = times(axes.map((axis) => field[axis][1] - field[axis][0]));
      this.fieldText = `${exact ? "receptive field" : "box of gradients that are not zero"}, ${sizes}`;
    }
    this.makeTools();
    this.paint();
  }

  makeChips() {
    const { kind, row, column, example } = this.row.layout;
    this.chips.hidden = kind !== "tokens";
    if (kind !== "tokens") return this.chips.replaceChildren();
    const axis = row === null ? column : row, texts = this.texts(example === null ? 0 : this.data.window.index[example]);
    const [numbers, narrow, scale] = this.gradient ? [this.gradient, this.data.narrowGradient, this.data.gradientScale]
      : [this.values, this.data.narrow, this.data.scale];
    const size = (cell) => { const number = Math.abs(numbers[this.at(cell)]); return Number.isNaN(number) ? Infinity : number; };
    // One for each row of cells (where they are in a line, for each cell), with the text of its largest number.
    const cells = Array.from({ length: row === null ? this.size.columns : this.size.rows }, (_, place) => {
      if (row === null) return { t: 0, r: 0, c: place };
      let best = { t: 0, r: place, c: 0 };
      for (let c = 1; c < this.size.columns; c += 1) if (size({ t: 0, r: place, c }) > size(best)) best = { t: 0, r: place, c };
      return best;
    });
    this.chips.replaceChildren(...cells.map((cell) => {
      const index = this.indexOf(cell), value = numbers[this.at(cell)];
      const title = `${this.gradient ? "gradient of " : ""}${this.app.text(this.row, index)} = ${show(value, narrow)}`;
      const pick = { "aria-pressed": String(!!this.marked && this.marked[axis] === index[axis]), title, onclick: () => this.options.onPick(index) };
      const chip = make("button", { type: "button", ...pick }, texts[index[axis]]);
      if (this.gradient || row !== null) {
        const [red, green, blue] = this.colour(value, scale.limit);
        chip.style.setProperty("--chip", `rgb(${red} ${green} ${blue})`);
      }
      return chip;
    }));
    // Scroll to what is chosen, or to the chip that stands for it; the page itself stays where it is.
    const marked = this.cellOf(this.marked), chip = marked && this.chips.children[row === null ? marked.c : marked.r];
    this.chips.scrollTop = chip ? chip.offsetTop - this.chips.offsetTop - this.chips.clientHeight / 2 : 0;
    return undefined;
  }
}

// The names as a tree, by the parts of their paths; drawn as a list of the rows that are open.
class Tree {
  constructor(app, onchoose) {
    Object.assign(this, { app, onchoose, query: "", thumbnails: new Map(), wanted: new Set() });
    this.search = make("input", {
      type: "search", maxLength: 500, placeholder: "Search, or a[0, 3, 2]", "aria-label": "Search the names, or go to a place",
      oninput: () => { this.query = this.search.value; this.draw(); },
    });
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") app.find(this.search.value.trim());
      if (event.key === "ArrowDown") { event.preventDefault(); this.list.querySelector("[role=treeitem]")?.focus(); }
      if (event.key === "Escape") { this.search.value = this.query = ""; this.draw(); }
    });
    this.list = make("div", { role: "tree", "aria-label": "Tensors of the model", className: "eg-tree" });
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) this.want(Number(entry.target.dataset.tensor));
    }, { root: this.list, rootMargin: "120px" });
    this.element = make("nav", { className: "eg-names", "aria-label": "Names" }, this.search, this.list);
    this.roots = this.build(app.start.names);
  }

  build(names) {
    const groups = { input: "Inputs", activation: "Layers", output: "Outputs", parameter: "Parameters", buffer: "Buffers" };
    return Object.entries(groups).map(([kind, title]) => {
      const root = { title, path: kind, children: [], level: 1 }, nodes = new Map([["", root]]);
      let count = 0;
      names.forEach((row, tensor) => {
        if (row.kind !== kind) return;
        count += 1;
        const parts = row.name.split(/(?<=[./])/);
        let path = "", node = root;
        parts.forEach((part, depth) => {
          path += part;
          const key = path.replace(/[./]$/, "");
          if (!nodes.has(key)) {
            const child = { title: part.replace(/[./]$/, "") || part, path: `${kind} ${key}`, children: [], level: depth + 2 };
            nodes.set(key, child);
            node.children.push(child);
          }
          node = nodes.get(key);
        });
        node.tensor = tensor;
      });
      root.count = count;
      root.open = !["parameter", "buffer"].includes(kind);
      const open = (node, depth) => node.children.forEach((child) => {
        child.open = count <= 40 || depth < 1;
        open(child, depth + 1);
      });
      open(root, 0);
      return root;
    }).filter((root) => root.children.length);
  }

  rows() {
    const query = this.query.replace(/\[.*/, "").trim().toLowerCase();
    if (query) {
      const nodes = this.app.start.names.map(({ name, kind }, tensor) => ({ title: name, path: `${kind} ${name}`, children: [], tensor, level: 1 }));
      const found = nodes.filter((node) => node.title.toLowerCase().includes(query));
      const left = found.splice(300).length;
      const say = (title) => found.push({ title, path: "more", children: [], level: 1 });
      if (left) say(`${left} more; search for more of the name`);
      if (!found.length) say("No name has this in it");
      return found;
    }
    const rows = [], visit = (node) => { rows.push(node); if (node.open) node.children.forEach(visit); };
    this.roots.forEach(visit);
    return rows;
  }

  draw() {
    const { focused } = this.app, path = this.list.contains(focused) ? focused.dataset.path : null;
    this.observer.disconnect();
    this.visible = this.rows();
    const items = this.visible.map((node) => this.makeItem(node));
    this.list.replaceChildren(...items);
    const again = items.find((item) => item.dataset.path === path);
    const first = again || items.find((item) => item.getAttribute("aria-selected") === "true") || items[0];
    if (first) first.tabIndex = 0;
    if (again) again.focus({ preventScroll: true });
  }

  makeItem(node) {
    const { start, state } = this.app, row = start.names[node.tensor], isBranch = node.children.length > 0;
    const roles = Object.entries({ source: state.source, target: state.target?.tensor })
      .filter(([, tensor]) => row && tensor === node.tensor).map(([role]) => role);
    const described = row ? [row.name, row.kind, `${times(row.shape)} ${row.dtype}`, ...roles]
      : [node.title, `${node.count || node.children.length} names`];
    const item = make("div", {
      role: "treeitem", tabIndex: -1, className: `eg-node${node.level === 1 && node.count ? " eg-root" : ""}`,
      "aria-level": String(node.level), "aria-selected": String(!!row && node.tensor === state.hand),
      "aria-expanded": isBranch ? String(!!node.open) : null, "aria-label": described.join(", "),
      onclick: (event) => this.click(node, event),
    }, make("span", "eg-twist", isBranch ? (node.open ? "▾" : "▸") : ""));
    item.dataset.path = node.path;
    item.style.setProperty("--level", node.level);
    if (row) {
      item.dataset.tensor = node.tensor;
      item.append(this.thumbnail(node.tensor));
      this.observer.observe(item);
    }
    item.append(make("span", { className: "eg-name", title: row ? row.name : node.title }, node.title),
      ...roles.map((role) => make("span", `eg-role eg-${role}`, role)),
      make("span", "eg-shape", row ? row.shape.join("×") || "one number" : String(node.count || "")));
    return item;
  }

  click(node, event) {
    if (node.tensor === undefined || event.target.classList.contains("eg-twist")) this.toggle(node);
    else this.onchoose(node.tensor);
  }

  toggle(node) {
    node.open = !node.open;
    this.draw();
  }

  reveal(tensor) {
    const row = this.app.start.names[tensor], open = (node) => {
      if (node.tensor === tensor) return true;
      if (node.children.some(open)) { node.open = true; return true; }
      return false;
    };
    this.roots.filter((root) => root.path === row.kind).forEach(open);
    this.draw();
    this.list.querySelector(`[data-tensor="${tensor}"]`)?.scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const items = [...this.list.children], at = items.indexOf(this.app.focused), node = this.visible[at];
    if (!node || event.ctrlKey || event.metaKey || event.altKey) return;
    const go = (to) => {
      const item = items[limit(to, 0, items.length - 1)];
      items.forEach((other) => { other.tabIndex = other === item ? 0 : -1; });
      item.focus();
    };
    const parent = () => {
      for (let up = at - 1; up >= 0; up -= 1) if (this.visible[up].level < node.level) return up;
      return at;
    };
    const actions = {
      ArrowDown: () => go(at + 1), ArrowUp: () => go(at - 1), Home: () => go(0), End: () => go(items.length - 1),
      ArrowRight: () => { if (node.children.length) { if (node.open) go(at + 1); else this.toggle(node); } },
      ArrowLeft: () => { if (node.children.length && node.open) this.toggle(node); else go(parent()); },
      Enter: () => { if (node.tensor !== undefined) this.onchoose(node.tensor); else this.toggle(node); },
      " ": () => actions.Enter(),
    };
    if (event.key in actions) { event.preventDefault(); actions[event.key](); }
  }

  thumbnail(tensor) {
    const canvas = make("canvas", { className: "eg-thumb", width: 20, height: 20, role: "presentation" });
    canvas.dataset.thumb = tensor;
    this.paint(canvas, this.thumbnails.get(tensor));
    return canvas;
  }

  paint(canvas, picture) {
    if (!picture) return;
    canvas.width = picture.columns;
    canvas.height = picture.rows;
    const context = canvas.getContext("2d"), image = new ImageData(picture.columns, picture.rows);
    const steps = new Int8Array(bytes(picture.steps)), low = Math.min(0, ...steps.filter((step) => Math.abs(step) < 127));
    const odd = { "-128": "NaN", 127: "+inf", "-127": "-inf" };
    const isImage = this.app.row(Number(canvas.dataset.thumb)).layout.kind === "image";
    steps.forEach((step, at) => {
      const grey = Math.round((255 * (step - low)) / (126 - low));
      const colour = isImage ? [grey, grey, grey] : this.app.colours[2 * step + 255];
      image.data.set([...(step in odd ? this.app.nonfinite[odd[step]] : colour), 255], 4 * at);
    });
    context.putImageData(image, 0, 0);
  }

  want(tensor) {
    if (this.thumbnails.has(tensor)) return;
    this.wanted.add(tensor);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.load(), 150);
  }

  async load() {
    if (this.app.busy) { this.timer = setTimeout(() => this.load(), 150); return; }
    const tensors = [...this.wanted].slice(0, 48);
    if (!tensors.length) return;
    tensors.forEach((tensor) => { this.wanted.delete(tensor); this.thumbnails.set(tensor, null); });
    const message = { ask: "thumbnails", tensors, index: [this.app.state.example], edits: this.app.edits() };
    const answer = await this.app.request("thumbnails", message, true);
    if (!answer) { tensors.forEach((tensor) => this.thumbnails.delete(tensor)); return; }
    for (const [tensor, picture] of Object.entries(answer.thumbnails || {})) {
      this.thumbnails.set(Number(tensor), picture);
      this.list.querySelectorAll(`[data-thumb="${tensor}"]`).forEach((canvas) => this.paint(canvas, picture));
    }
    if (this.wanted.size) this.load();
  }

  repaint() {
    for (const canvas of this.list.querySelectorAll("[data-thumb]")) {
      this.paint(canvas, this.thumbnails.get(Number(canvas.dataset.thumb)));
    }
  }
  forget() { this.thumbnails.clear(); this.draw(); }
}

class App {
  constructor(root, start, ask) {
    Object.assign(this, { root, start, ask, slots: new Map(), history: [], position: -1, edited: new Map() });
    this.state = { hand: start.output, handView: {}, target: null, source: start.source, sourceView: {}, picked: null, example: 0 };
    this.root.classList.add("elementgrad-explore");
    this.root.setAttribute("data-lm-suppress-shortcuts", "true");
    this.makePage();
    this.chooseTheme(this.remembered());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.chooseTheme(this.theme));
    new ResizeObserver(() => { this.hand.resize(); this.answer.resize(); }).observe(this.root);
    // Not `:hover`, which is what is under the pointer after the push.
    const point = (event) => { this.pointed = this.drivers.contains(event.target); };
    this.root.addEventListener("pointerdown", point);
    this.root.addEventListener("pointermove", (event) => { if (event.movementX || event.movementY) point(event); });
    const above = new ResizeObserver(() => this.keepDriversInPlace());
    for (const element of [this.hand.element, ...this.right.children]) if (element !== this.drivers) above.observe(element);
    this.root.tabIndex = -1;
    (this.alone ? document : this.root).addEventListener("keydown", (event) => this.key(event));
    this.open();
  }

  // Open with the largest number of the output in sight as the target, so that there is an answer at once.
  async open() {
    this.tree.draw();
    const data = await this.showHand();
    if (!data || this.state.target || !this.row(this.state.hand).floating) return;
    const { values, size: { rows, columns } } = this.hand;
    let best = 0;
    values.forEach((value, at) => { if (value > values[best] || Number.isNaN(values[best])) best = at; });
    const cell = { t: Math.floor(best / (rows * columns)), r: Math.floor(best / columns) % rows, c: best % columns };
    this.setTarget({ tensor: this.state.hand, index: this.hand.indexOf(cell) });
  }

  get alone() { return document.body.classList.contains("elementgrad-page"); }  // not among others in a notebook
  row(tensor) { return this.start.names[tensor]; }
  text(row, index) {
    const kind = this.start.names.filter((other) => other.name === row.name).length > 1 ? ` (${row.kind})` : "";
    return `${row.name}${index && index.length ? `[${index.join(", ")}]` : ""}${kind}`;
  }
  elementText(element) { return this.text(this.row(element.tensor), element.index); }
  edits() { return [...this.edited.values()]; }
  style(name) { return getComputedStyle(this.root).getPropertyValue(name).trim(); }
  get focused() { return this.root.getRootNode().activeElement; }  // which may be in a shadow root
  // Replace what is in an element; the focus stays in the page, so that keys go on working.
  swap(element, ...children) { this.keepFocus(element, () => element.replaceChildren(...children)); }
  keepFocus(element, change) {
    const had = element.contains(this.focused);
    change();
    if (had && !element.contains(this.focused)) this.root.focus({ preventScroll: true });
  }
  get busy() { return [...this.slots.keys()].some((slot) => slot !== "thumbnails"); }

  // Ask the session. A newer question of the same slot takes the place of an older one, whose answer is discarded.
  async request(slot, message, quiet = false) {
    this.slots.get(slot)?.controller.abort();
    const entry = { controller: new AbortController(), started: performance.now(), quiet, said: "" };
    this.slots.set(slot, entry);
    this.tell();
    try {
      const answer = await this.ask(message, entry.controller.signal, (said) => { entry.said = said; this.tell(); });
      if (this.slots.get(slot) !== entry) return null;
      this.slots.delete(slot);
      if (answer.error && !quiet && !SHOWN_IN_PLACE.includes(slot)) this.complain(answer.error);
      return answer.error ? { failed: answer.error } : answer;
    } catch (error) {
      if (this.slots.get(slot) === entry && error.name !== "AbortError") {
        this.cancel();
        this.complain("The session does not answer; is the program still running?");
      } else if (this.slots.get(slot) === entry) this.slots.delete(slot);
      return null;
    } finally { this.tell(); }
  }

  // Give up all reads, and return to what the pictures show.
  cancel() {
    const asked = new Set(this.slots.keys()), { shownHand, shownAnswer } = this;
    for (const entry of this.slots.values()) entry.controller.abort();
    this.slots.clear();
    this.tell();
    for (const { element } of [this.hand, this.answer]) element.removeAttribute("aria-busy");
    if (asked.has("tensor") && shownHand) {
      this.showExample(shownHand.example);
      Object.assign(this.state, shownHand);
      this.describeHand();
    }
    if (asked.has("gradient") && shownAnswer) {
      const { position, edited, ...state } = shownAnswer;
      Object.assign(this.state, state);
      Object.assign(this, { position, edited: new Map(edited) });
      this.sourceSelect.value = String(state.source);
      this.drawEdits();
      if (this.history.length) this.drawCrumbs();
    }
    if (asked.has("tensor") || asked.has("gradient")) this.tree.draw();
  }

  // Progress, once it takes longer than one would notice.
  tell() {
    clearTimeout(this.clock);
    this.root.toggleAttribute("data-busy", this.slots.size > 0);
    const entries = [...this.slots.entries()].filter(([, entry]) => !entry.quiet);
    const since = Math.min(...entries.map(([, entry]) => entry.started)), seconds = (performance.now() - since) / 1000;
    if (!entries.length || seconds < 0.3) this.progress.hidden = true;
    else {
      const said = entries.map(([, entry]) => entry.said).find(Boolean) || "reading";
      const slots = entries.map(([slot]) => slot).join(", ");
      this.progressText.textContent = `${said[0].toUpperCase()}${said.slice(1)} (${slots}), ${seconds.toFixed(1)} s`;
      this.progress.hidden = false;
    }
    if (entries.length) this.clock = setTimeout(() => this.tell(), 250);
  }

  complain(text) {
    const [sentence, ...lines] = text.split("\n");  // those that follow point at a place with a ^
    this.alert.replaceChildren(sentence, ...(lines.length ? [make("code", {}, ["", ...lines].join("\n"))] : []));
    this.alertBox.hidden = false;
  }
  say(text) {
    this.status.textContent = text;
    clearTimeout(this.saying);
    this.saying = setTimeout(() => { this.status.textContent = ""; }, 2500);
  }

  makePage() {
    const { button } = this;
    this.tree = new Tree(this, (tensor) => this.take(tensor));
    this.hand = new Picture(this, {
      label: () => {
        const row = this.row(this.state.hand);
        return `${row.name}, ${row.kind}, shape ${times(row.shape)}`;
      },
      height: () => 460,
      onWindow: (view) => { this.state.handView = view; this.showHand(); },
      onPick: (index) => { if (this.hand.row === this.row(this.state.hand)) this.setTarget({ tensor: this.state.hand, index }); },
    });
    this.answer = new Picture(this, {
      label: () => {
        const { target, source } = this.state, { name } = this.row(source);
        return target ? `Gradient of ${this.elementText(target)} with respect to ${name}` : name;
      },
      height: () => 320,
      onWindow: (view) => { this.state.sourceView = view; this.showAnswer(false); },
      onPick: (index) => { if (this.answer.row === this.row(this.state.source)) this.pick(index); },
    });
    this.title = make("h2", "eg-hand-title");
    this.facts = make("p", "eg-facts");
    const choose = () => this.setSource(Number(this.sourceSelect.value));
    this.sourceSelect = make("select", { "aria-label": "Source", onchange: choose });
    this.start.names.forEach((row, tensor) => {
      if (row.floating) this.sourceSelect.append(make("option", { value: tensor }, `${this.text(row)}  ${times(row.shape)}`));
    });
    this.crumbs = make("ol", { className: "eg-crumbs", "aria-label": "Targets so far" });
    this.passedNote = make("p", { className: "eg-notes", hidden: true });
    this.backButton = button("Back", "[", () => this.travel(-1));
    this.forwardButton = button("Forward", "]", () => this.travel(1));
    this.question = make("h2", "eg-question");
    this.missing = make("div", { className: "eg-callout eg-bad", hidden: true });
    this.elementBox = make("section", { className: "eg-element", "aria-label": "The chosen element", hidden: true });
    this.drivers = make("div", "eg-drivers");
    // A list that is drawn anew between press and release would lose the click: it waits for the release.
    this.drivers.addEventListener("pointerdown", () => {
      this.released = new Promise((resolve) => {
        const release = () => setTimeout(resolve);
        for (const kind of ["pointerup", "pointercancel"]) window.addEventListener(kind, release, { once: true });
      });
    });
    this.code = make("code", {});
    this.alert = make("span", {});
    const dismiss = button("Dismiss", "", () => { this.alertBox.hidden = true; });
    this.alertBox = make("div", { className: "eg-callout eg-bad", role: "alert", hidden: true }, this.alert, dismiss);
    this.status = make("span", { className: "eg-status", role: "status" });
    this.progressText = make("span");
    this.progress = make("div", { className: "eg-progress", role: "status", hidden: true },
      make("i", "eg-spin"), this.progressText, button("Cancel", "Escape", () => this.cancel()));
    this.themeButton = button("Theme", "", () => this.chooseTheme({ auto: "light", light: "dark", dark: "auto" }[this.theme]));
    this.editBox = make("span", "eg-edits");
    const framework = { torch: "PyTorch", tensorflow: "TensorFlow", jax: "JAX" }[this.start.framework];
    const header = make("header", "eg-header",
      make("h1", {}, this.start.title), make("span", "eg-sub", `${framework} · ${this.start.names.length} tensors`),
      this.makeExamples(), this.editBox, make("span", "eg-space"), this.status,
      button("Keys", "?", () => this.help()), this.themeButton);
    const centre = make("main", { className: "eg-centre", "aria-label": "The tensor in hand" },
      this.title, this.facts,
      make("div", "eg-actions",
        button("Use as source", "s", () => this.setSource(this.state.hand)), button("Copy as code", "", () => this.copy(true))),
      this.hand.element, make("p", "eg-hint", "Click an element to make it the target."));
    const right = this.right = make("aside", { className: "eg-answer", "aria-label": "The answer" },
      make("div", "eg-trail", this.backButton, this.forwardButton, this.crumbs), this.passedNote, this.question,
      make("label", "eg-source-choice", make("span", {}, "by the source "), this.sourceSelect),
      make("div", "eg-actions",
        button("Walk back", "w", () => this.walk()), button("Copy as code", "c", () => this.copy()),
        button("Download report", "r", () => this.report()), button("Explain", "e", () => this.explain())),
      this.missing, this.answer.element,
      make("pre", { className: "eg-code", tabIndex: 0, "aria-label": "The same as code" }, this.code),
      this.elementBox, this.drivers);
    this.root.replaceChildren(header, this.alertBox, make("div", "eg-body", this.tree.element, centre, right), this.progress);
  }

  button(text, key, onclick, options = {}) {
    const title = key ? `${text} (key ${key})` : text;
    return make("button", { type: "button", onclick, title, "aria-keyshortcuts": key || null, ...options }, text);
  }

  makeExamples() {
    const { examples, exampleLabels } = this.start;
    if (examples < 2) return null;
    const go = (step) => this.setExample(this.state.example + step);
    const choose = () => this.setExample(Number(this.exampleSelect.value));
    this.exampleSelect = make("select", { "aria-label": "Example", onchange: choose });
    for (let k = 0; k < Math.min(examples, 2000); k += 1) {
      this.exampleSelect.append(make("option", { value: k }, exampleLabels[k] ? `${k}: ${exampleLabels[k]}` : String(k)));
    }
    return make("label", "eg-examples", "example ",
      this.button("‹", ",", () => go(-1), { "aria-label": "previous example" }), this.exampleSelect,
      this.button("›", ".", () => go(1), { "aria-label": "next example" }), ` of ${examples}`);
  }

  // The message that asks for a window of a tensor, at the example in sight and what the user chose for further axes.
  askFor(tensor, view, of) {
    const row = this.row(tensor), index = view.index?.length === row.shape.length ? [...view.index] : row.shape.map(() => 0);
    if (row.layout.example !== null) index[row.layout.example] = this.state.example;
    return { ask: "view", tensor, of, index, tiles: view.tiles, rows: view.rows, columns: view.columns, edits: this.edits() };
  }

  // A message on the source, or on the element of it that is chosen.
  asking(ask) {
    const { target, source, picked } = this.state;
    return { ask, tensor: source, of: target, index: picked || undefined, edits: this.edits() };
  }

  async showHand() {
    const { hand, handView, example } = this.state, row = this.row(hand);
    this.describeHand();
    this.hand.element.setAttribute("aria-busy", "true");
    const data = await this.request("tensor", this.askFor(hand, handView));
    if (!data) return null;
    this.hand.element.removeAttribute("aria-busy");
    this.shownHand = { hand, handView, example };
    if (data.failed) {
      this.hand.clear(data.failed);
      return null;
    }
    this.hand.marked = this.state.target && this.state.target.tensor === hand ? this.state.target.index : null;
    this.hand.set(row, data, handView);
    this.hand.paint();
    return data;
  }

  describeHand() {
    const row = this.row(this.state.hand);
    this.title.textContent = this.text(row);
    this.facts.textContent = `${row.kind} · ${times(row.shape)} · ${row.dtype}`;
  }

  async showAnswer(fresh = true) {
    const { target, source, sourceView, picked } = this.state, edited = new Map(this.edited), row = this.row(source);
    this.sourceSelect.value = String(source);
    if (!target) return;
    this.answer.element.setAttribute("aria-busy", "true");
    if (fresh) {
      this.alertBox.hidden = true;
      for (const slot of ["shares", "explain", "drivers", "field"]) this.slots.get(slot)?.controller.abort();
    }
    const data = await this.request("gradient", this.askFor(source, sourceView, target));
    if (!data) return;
    this.answer.element.removeAttribute("aria-busy");
    this.shownAnswer = { target, source, sourceView, picked, edited, position: this.position };
    const value = data.failed ? "" : make("span", "eg-value", ` = ${show(data.of.value, data.of.narrow)}`);
    this.question.replaceChildren("What drives ", make("code", {}, data.failed ? this.elementText(target) : data.of.text), value);
    this.missing.hidden = !data.missing && !data.failed;
    this.missing.textContent = data.missing || data.failed || "";
    if (data.failed || this.drivers.dataset.source !== String(source)) this.swap(this.drivers);  // those of another tensor
    if (data.failed) {
      this.answer.clear("");
      this.clearElement();
      this.updateCode();
    } else {
      if (fresh) this.answer.field = null;
      this.answer.marked = this.state.picked;
      this.answer.set(row, data, sourceView);
    }
    this.root.dataset.shown = String(Number(this.root.dataset.shown || 0) + 1);
    if (!fresh || data.failed) return;
    this.updateCode();
    this.showElement();
    if (data.missing) { this.swap(this.drivers); this.explain(); return; }
    this.showDrivers();
    const field = await this.request("field", { ask: "field", tensor: source, of: target, edits: this.edits() }, true);
    if (field && !field.failed) this.answer.setField(field.field, field.exact);
    if (this.state.sourceView.follow) this.answer.zoomToField();
    const zero = this.answer.data === data && data.gradientScale.lowest === 0 && data.gradientScale.highest === 0;
    if (zero && !this.state.picked) this.explain();
  }

  async showDrivers() {
    const { target, source } = this.state;
    const answer = await this.request("drivers", { ask: "drivers", tensor: source, of: target, edits: this.edits() }, true);
    if (!answer || answer.failed) return;
    await this.released;
    if (!sameElement(target, this.state.target) || source !== this.state.source) return;
    this.drivers.dataset.source = String(source);
    const sizes = answer.drivers.map(({ gradient }) => (typeof gradient === "string" ? Infinity : Math.abs(gradient)));
    const widest = Math.max(...sizes.filter(Number.isFinite), 0) || 1;
    const rows = answer.drivers.map((driver, place) => {
      const chosen = sameIndex(driver.index, this.state.picked), { gradient } = driver;
      const sign = Number.isFinite(gradient) ? (gradient < 0 ? "eg-below" : "eg-above") : "eg-odd-bar";
      const line = make("tr", { className: sign, "aria-selected": String(chosen) },
        make("th", { scope: "row" }, String(place + 1)),
        make("td", {}, this.link(driver.text, () => { if (source === this.state.source) this.pick(driver.index); })),
        make("td", "eg-number", show(driver.gradient, answer.narrow)),
        make("td", "eg-number", show(driver.value, answer.narrowValues)),
        make("td", "eg-bar", make("i", "eg-part")));
      line.style.setProperty("--part", `${Math.round(Math.min(1, sizes[place] / widest) * 100)}%`);
      return line;
    });
    const title = { 0: "No drivers", 1: "The only driver" }[rows.length] || `Top ${rows.length} drivers`;
    const some = { 0: "none has", 1: "1 has" }[answer.nonzero] || `${answer.nonzero} have`;
    this.swap(this.drivers, make("h3", {}, title),
      make("p", "eg-notes", `Of ${answer.size} ${answer.size === 1 ? "element" : "elements"}, ${some} a gradient that is not zero.`),
      rows.length ? makeTable(["", "element", "gradient", "value", ""], rows) : "");
  }

  link(text, onclick, options = {}) {
    return make("button", { type: "button", className: "eg-link", onclick, ...options }, text);
  }

  // `passed`: the layers that hand the target on, which a walk has stepped over.
  setTarget(target, source = this.state.source, remember = true, passed = []) {
    const sourceView = source === this.state.source ? this.state.sourceView : {};
    Object.assign(this.state, { target, source, sourceView, picked: null });
    if (this.hand.row) {
      this.hand.marked = this.hand.row === this.row(target.tensor) ? target.index : null;
      this.hand.paint();
      this.hand.read();
    }
    const shown = this.showAnswer();  // first, so that it is read meanwhile
    if (remember) this.remember(passed);
    this.tree.draw();
    return shown;
  }

  setSource(source) {
    const { name, floating, dtype } = this.row(source);
    if (!floating) {
      this.complain(`${name} is of dtype ${dtype}, which has no gradients; choose another source.`);
      return;
    }
    Object.assign(this.state, { source, picked: null, sourceView: {} });
    if (this.state.target) this.remember();
    this.tree.draw();
    this.showAnswer();
  }

  take(tensor, view = {}) {
    if (view.index) this.showExampleOf(tensor, view.index);
    Object.assign(this.state, { hand: tensor, handView: view });
    const shown = this.showHand();
    this.tree.draw();
    return shown;
  }

  showExample(example) {
    if (this.exampleSelect) this.exampleSelect.value = String(example);
    if (example === this.state.example) return;
    this.state.example = example;
    this.tree.forget();
  }

  showExampleOf(tensor, index) {
    const axis = this.row(tensor).layout.example;
    if (axis !== null) this.showExample(index[axis]);
  }

  setExample(example) {
    if (example < 0 || example >= this.start.examples || !this.start.examples) return;
    const { target, picked, source } = this.state;
    this.showExample(example);
    const move = (tensor, index) => index.map((at, axis) => (axis === this.row(tensor).layout.example ? example : at));
    if (target) this.state.target = { tensor: target.tensor, index: move(target.tensor, target.index) };
    if (picked) this.state.picked = move(source, picked);
    this.showHand();
    if (target) { this.remember(); this.showAnswer(); }
  }

  remember(passed = []) {
    const { hand, target, source, example } = this.state;
    this.history = this.history.slice(0, this.position + 1);
    this.history.push({ view: { hand, target, source, example }, passed });
    this.position = this.history.length - 1;
    this.drawCrumbs();
  }

  // Take a tensor in hand, at an element that is not the target.
  async look({ tensor, index }) {
    await this.take(tensor, { index });
    this.tree.reveal(tensor);
    if (this.hand.row !== this.row(tensor)) return;
    this.hand.cursor = this.hand.cellOf(index);
    this.hand.paint();
    this.hand.read();
  }

  // What comes in above the list would push it away from under the pointer, on its way to the next driver.
  keepDriversInPlace() {
    const top = this.drivers.offsetTop, shift = top - this.driversTop;
    this.driversTop = top;
    if (!shift || !this.pointed) return;
    if (this.right.scrollHeight > this.right.clientHeight) this.right.scrollTop += shift;
    else if (this.alone) window.scrollBy(0, shift);
  }

  travel(step) { this.goTo(this.position + step); }

  goTo(position) {
    if (position < 0 || position >= this.history.length) return;
    this.position = position;
    const { view } = this.history[position], handView = view.target.tensor === view.hand ? { index: view.target.index } : {};
    this.showExample(view.example);
    Object.assign(this.state, view, { picked: null, handView, sourceView: {} });
    this.tree.reveal(this.state.hand);
    this.drawCrumbs();
    this.showHand();
    this.showAnswer();
  }

  drawCrumbs() {
    this.backButton.disabled = this.position <= 0;
    this.forwardButton.disabled = this.position >= this.history.length - 1;
    const isNew = (at) => at === 0 || !sameElement(this.history[at].view.target, this.history[at - 1].view.target);
    const shown = this.history.map((entry, at) => ({ ...entry, at })).filter(({ at }) => isNew(at));
    const current = shown.findLast(({ at }) => at <= this.position);
    const items = shown.slice(-8).flatMap(({ view, passed, at }) => [
      ...passed.map((element) => {
        const title = `${this.elementText(element)} is the same number: look at it`;
        return make("li", "eg-passed", this.link(`via ${this.row(element.tensor).name}`, () => this.look(element), { title }));
      }),
      make("li", {}, this.link(this.elementText(view.target), () => this.goTo(at),
        { "aria-current": at === current.at ? "step" : null })),
    ]);
    if (shown.length > 8) items.unshift(make("li", {}, `${shown.length - 8} earlier`));
    this.swap(this.crumbs, ...items);
    const { passed } = current;
    this.passedNote.hidden = !passed.length;
    if (!passed.length) return;
    const from = this.elementText(this.history[current.at - 1].view.target);
    const same = passed.map((element) => this.elementText(element)).join(" and ");
    this.passedNote.textContent = `${from} is the same number as ${same}; the walk went on from there.`;
  }

  // Choose an element of the source: its number, shares, and why it is zero or missing.
  pick(index) {
    for (const slot of ["place", "walk"]) this.slots.get(slot)?.controller.abort();  // or their answer would take its place
    this.state.picked = index;
    if (this.shownAnswer) this.shownAnswer.picked = index;
    this.updateCode();
    this.answer.marked = index;
    if (!this.answer.cellOf(index)) {
      this.showExampleOf(this.state.source, index);
      this.state.sourceView = { index };
      this.showAnswer(false).then(() => this.showElement());
    } else { this.answer.paint(); this.answer.read(); this.answer.makeChips(); this.showElement(); }
    const text = this.text(this.row(this.state.source), index);
    for (const row of this.drivers.querySelectorAll("tbody tr")) {
      row.setAttribute("aria-selected", String(row.querySelector("button").textContent === text));
    }
  }

  // The value and gradient of an element of the source: in the picture, unless a larger number of its cell is there.
  async numbersOf(source, index) {
    this.slots.get("element")?.controller.abort();
    const { answer } = this, { tile, row, column } = this.row(source).layout;
    if (answer.hasExactly(index)) {
      const at = answer.at(answer.cellOf(index));
      return { value: answer.values[at], slope: answer.gradient ? answer.gradient[at] : null };
    }
    const only = (axis) => (axis === null ? undefined : [index[axis], index[axis] + 1]);
    const view = { index, tiles: only(tile), rows: only(row), columns: only(column) };
    const data = await this.request("element", this.askFor(source, view, this.state.target));
    if (!data || data.failed) return null;
    const slope = data.gradient ? decode(data.gradient, data.narrowGradient)[0] : null;
    return { value: decode(data.values, data.narrow)[0], slope };
  }

  async showElement() {
    const { target, source, picked } = this.state, { answer } = this;
    this.elementBox.hidden = !picked || !target;
    if (this.elementBox.hidden) { this.swap(this.elementBox); return; }
    const row = this.row(source), exact = await this.numbersOf(source, picked);
    if (!exact) return;
    const { value, slope } = exact, key = JSON.stringify([source, picked]);
    const number = make("p", "eg-derivative",
      make("code", {}, `d ${this.elementText(target)} / d ${this.text(row, picked)}`),
      make("strong", "eg-number", slope === null ? "no gradient" : show(slope, answer.data.narrowGradient)));
    const shares = make("div", "eg-shares"), verdict = make("div", "eg-verdict");
    // The slider that is in use stays, with the focus and the range that it has.
    if (!row.editable) this.slider = null;
    else if (this.slider && this.elementBox.dataset.element === key) this.slider.number.value = show(value, answer.data.narrow);
    else this.slider = this.makeSlider(source, picked, value);
    this.elementBox.dataset.element = key;
    const focused = this.elementBox.contains(this.focused) ? this.focused : null;
    this.swap(this.elementBox, number, make("p", "eg-notes", `value ${show(value, answer.data.narrow)}`),
      ...(this.slider ? [this.slider.element] : []),
      make("div", "eg-actions", this.button("Make this the target", "t", () => this.follow())), verdict, shares);
    if (focused && this.elementBox.contains(focused)) focused.focus({ preventScroll: true });  // it was taken out and put back
    if (this.slider && this.slider.dragging) return;
    if (!slope || !Number.isFinite(slope)) this.explain();
    if (slope !== null) this.showShares(shares);
  }

  // There are no numbers, but the slider stays: it may have set the value that was too much.
  clearElement() {
    const { source, picked } = this.state, isSame = this.elementBox.dataset.element === JSON.stringify([source, picked]);
    const kept = picked && isSame && this.slider ? this.slider.element : null;
    this.keepFocus(this.elementBox, () => {
      for (const child of [...this.elementBox.children]) if (child !== kept) child.remove();
    });
    this.elementBox.hidden = !kept;
  }

  async showShares(place) {
    const found = await this.request("shares", this.asking("shares"));
    if (!found) return;
    if (found.failed) {
      place.replaceChildren(make("p", "eg-notes", `Shares: ${found.failed}`));
      return;
    }
    const hasLines = found.shares.some((share) => share.where);  // a model of ready-made layers has none
    const rows = [...found.shares, { operation: "total", value: found.total }].map((share) => make("tr", {},
      make("th", { scope: "row" }, share.operation), hasLines ? make("td", {}, share.where || "") : null,
      make("td", "eg-number", show(share.value, found.narrow))));
    const heads = ["operation", ...(hasLines ? ["line"] : []), "share"];
    place.replaceChildren(make("h3", {}, "Shares by path"), makeTable(heads, rows));
  }

  makeSlider(tensor, index, value) {
    const { scale, narrow } = this.answer.data, key = JSON.stringify([tensor, index]);
    const span = Math.max(scale.highest - scale.lowest, Math.abs(value), 1e-3) || 1;
    const low = Math.min(scale.lowest, value) - 0.5 * span, high = Math.max(scale.highest, value) + 0.5 * span;
    const slider = { dragging: false };
    const set = (number, last) => {
      if (!Number.isFinite(number)) return;
      this.edited.set(key, { tensor, index, value: number });
      slider.number.value = String(number);
      slider.range.value = String(number);
      slider.dragging = !last;
      this.drawEdits();
      clearTimeout(this.sliding);
      this.sliding = setTimeout(() => { this.refresh(last); }, last ? 0 : 30);
    };
    slider.range = make("input", {
      type: "range", min: low, max: high, step: "any", value, "aria-label": `value of ${this.text(this.row(tensor), index)}`,
      oninput: () => set(Number(slider.range.value), false), onchange: () => set(Number(slider.range.value), true),
    });
    slider.range.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      set(limit(Number((Number(slider.range.value) + (step * span) / 20).toPrecision(6)), low, high), true);
    });
    slider.number = make("input", {
      type: "number", step: "any", value: show(value, narrow), "aria-label": "value as a number",
      onchange: () => {
        if (slider.number.value) set(Number(slider.number.value), true);
        else slider.number.value = this.edited.has(key) ? String(this.edited.get(key).value) : show(value, narrow);  // not 0
      },
    });
    slider.element = make("div", "eg-slider", make("span", {}, "set it to"), slider.range, slider.number);
    return slider;
  }

  async refresh(all) {
    if (all) this.tree.forget();
    this.showHand();
    await this.showAnswer(all);
    if (!all) { this.showDerivative(); }
  }

  // While a slider moves, only the numbers follow; shares come when it rests.
  showDerivative() {
    const { answer, state: { picked } } = this, strong = this.elementBox.querySelector(".eg-derivative strong");
    if (!strong || !answer.gradient || !answer.hasExactly(picked)) return;
    strong.textContent = show(answer.gradient[answer.at(answer.cellOf(picked))], answer.data.narrowGradient);
  }

  drawEdits() {
    const count = this.edited.size, said = `${count} ${count === 1 ? "element is" : "elements are"} edited `;
    this.editBox.replaceChildren(...(count ? [said, this.button("Reset", "", () => this.resetEdits())] : []));
  }

  resetEdits() {
    this.edited.clear();
    this.drawEdits();
    this.slider = null;
    this.refresh(true);
  }

  // Make the chosen element the target, by the layer before it.
  async follow() {
    const { picked, source } = this.state;
    if (!picked) { this.walk(); return; }
    const target = { tensor: source, index: picked }, message = { ask: "walk", of: target, edits: this.edits() };
    const isLayer = this.row(source).kind === "activation";
    const step = isLayer ? await this.request("walk", message, true) : { tensor: source };
    if (!step) return;
    this.take(source, { index: picked });
    this.setTarget(target, step.failed ? this.start.source : step.tensor);
    this.tree.reveal(source);
  }

  async walk() {
    if (!this.state.target) return;
    const step = await this.request("walk", { ask: "walk", of: this.state.target, edits: this.edits() });
    if (!step || step.failed) return;
    this.take(step.tensor, { index: step.index });
    this.setTarget({ tensor: step.tensor, index: step.index }, step.source, true, step.passed);
    this.tree.reveal(step.tensor);
    const end = this.row(step.tensor).kind === "activation" ? "" : ", where the walk ends";
    this.say(`The strongest driver is ${this.elementText(step)}${end}`);
  }

  async explain() {
    const { target, picked } = this.state;
    if (!target) return;
    const found = await this.request("explain", this.asking("explain"));
    if (!found || found.failed) return;
    const kind = found.verdict === "flows" && !found.cause ? "eg-good" : found.verdict === "zero" ? "eg-odd" : "eg-bad";
    const lines = [["where", found.where], ...found.evidence.map((fact) => ["seen", fact]), ["fix", found.fix]];
    const box = make("div", `eg-callout ${kind}`, make("p", "eg-sentence", found.sentence),
      ...lines.filter(([, text]) => text).map(([word, text]) => make("p", {}, `${word}: ${text}`)));
    const place = picked ? this.elementBox.querySelector(".eg-verdict") : null;
    if (place) place.replaceChildren(box);
    else { this.missing.hidden = true; this.elementBox.hidden = false; this.swap(this.elementBox, make("div", "eg-verdict", box)); }
  }

  async updateCode() {
    const answer = await this.request("code", this.asking("code"), true);
    if (answer && !answer.failed) this.code.textContent = answer.code;
  }

  async copy(hand = false) {
    if (!hand && !this.state.target) return;
    const message = hand ? { ask: "code", tensor: this.state.hand, edits: this.edits() } : this.asking("code");
    const answer = await this.request("copy", message);
    if (!answer || answer.failed) return;
    try {
      await navigator.clipboard.writeText(answer.code);
    } catch {
      const area = make("textarea", { value: answer.code });
      this.root.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    this.say("Copied");
  }

  async report() {
    if (!this.state.target) return;
    const answer = await this.request("report", this.asking("report"));
    if (!answer || answer.failed) return;
    const link = make("a", { href: URL.createObjectURL(new Blob([answer.html], { type: "text/html" })), download: answer.file });
    this.root.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 2000);
    this.say("Report downloaded");
  }

  async find(text) {
    this.alertBox.hidden = true;
    if (!text) return;
    const exact = this.start.names.findIndex((row) => row.name === text), isName = !text.includes("[");
    const place = exact >= 0 ? { tensor: exact, index: null } : await this.request("place", { ask: "find", text }, isName);
    if (!place) return;
    if (place.failed) {
      const first = this.tree.visible.find((node) => node.tensor !== undefined);
      if (first && isName) this.take(first.tensor);
      return;
    }
    this.tree.search.value = this.tree.query = "";
    this.take(place.tensor, { index: place.index || undefined });
    this.tree.reveal(place.tensor);
    this.hand.canvas.focus({ preventScroll: true });
    if (place.index) this.setTarget({ tensor: place.tensor, index: place.index });
  }

  help() {
    this.dialog?.remove();
    const keys = KEYS.flatMap(([key, text]) => [make("dt", {}, make("kbd", {}, key)), make("dd", {}, text)]);
    this.dialog = make("dialog", { className: "eg-dialog", "aria-label": "Keys" }, make("h2", {}, "Keys"),
      make("dl", {}, ...keys), this.button("Close", "Escape", () => this.dialog.close()));
    this.root.append(this.dialog);
    this.dialog.showModal();
  }

  key(event) {
    event.stopPropagation();  // a notebook has shortcuts of its own
    const typing = /^(input|select|textarea)$/i.test(event.target.tagName);
    if (event.key === "Escape" && !this.dialog?.open) this.cancel();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || this.dialog?.open) return;
    const actions = {
      "/": () => this.tree.search.focus(), "?": () => this.help(),
      s: () => this.setSource(this.state.hand), t: () => this.follow(), w: () => this.walk(), f: () => this.answer.zoomToField(),
      "[": () => this.travel(-1), "]": () => this.travel(1),
      ",": () => this.setExample(this.state.example - 1), ".": () => this.setExample(this.state.example + 1),
      e: () => this.explain(), c: () => this.copy(), r: () => this.report(),
    };
    if (event.key in actions) { event.preventDefault(); actions[event.key](); }
  }

  remembered() {
    try {
      const theme = localStorage.getItem("elementgrad-theme");
      return ["light", "dark"].includes(theme) ? theme : "auto";
    } catch { return "auto"; }
  }

  // A notebook has a theme of its own.
  get hostIsDark() {
    const jupyter = document.body.dataset.jpThemeLight, vscode = document.body.className.match(/vscode-(dark|light)/);
    if (jupyter !== undefined) return jupyter === "false";
    return vscode ? vscode[1] === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  chooseTheme(theme) {
    this.theme = theme;
    const dark = theme === "dark" || (theme === "auto" && this.hostIsDark);
    this.root.dataset.theme = dark ? "dark" : "light";
    if (this.alone) document.body.dataset.theme = this.root.dataset.theme;
    this.themeButton.textContent = `Theme: ${theme}`;
    this.colours = makeColours(this.start.colours[dark ? "dark" : "light"]);
    this.greys = dark ? [40, 130] : [165, 255];
    this.nonfinite = Object.fromEntries(Object.entries(this.start.nonfinite).map(([kind, colour]) => [kind, hex(colour)]));
    try { localStorage.setItem("elementgrad-theme", theme); } catch { /* a notebook may have no storage */ }
    for (const picture of [this.hand, this.answer].filter(({ data }) => data)) {
      picture.resize();
      picture.makeScale();
      picture.makeChips();
    }
    this.tree.repaint();
  }
}

const mount = (element, start, ask) => {
  const root = make("div", {});
  element.replaceChildren(root);
  return new App(root, start, ask);
};

// The server: an answer is the last of some lines of JSON, and those before it tell of progress.
const askServer = async (message, signal, onprogress) => {
  const headers = { "Content-Type": "application/json" }, body = JSON.stringify(message);
  const response = await fetch(location.href, { method: "POST", headers, body, signal, credentials: "omit" });
  if (!response.ok) return { error: (await response.text()).trim() };
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    text += decoder.decode(value, { stream: !done });
    const lines = text.split("\n");
    text = lines.pop();
    for (const line of lines) {
      const answer = JSON.parse(line);
      if (!("progress" in answer)) return answer;
      onprogress(answer.progress);
    }
    if (done) return { error: "the answer breaks off" };
  }
};

// The widget: one message is sent at a time, so that what is cancelled while it waits is never asked.
const askWidget = (model) => {
  const waiting = new Map();
  // Views of one widget get each other's answers, so that their numbers must not be the same.
  let number = Math.floor(Math.random() * 2 ** 50), last = Promise.resolve();
  model.on("msg:custom", (content) => { waiting.get(content.id)?.(content.answer); waiting.delete(content.id); });
  return (message, signal) => {
    const mine = last.then(() => {
      signal.throwIfAborted();
      number += 1;
      const id = number, answer = new Promise((resolve) => { waiting.set(id, resolve); });
      model.send({ id, message: JSON.parse(JSON.stringify(message)) });
      return answer;
    });
    last = mine.catch(() => {});
    return mine.then((answer) => { signal.throwIfAborted(); return answer; });
  };
};

export default { render({ model, el }) { mount(el, model.get("start"), askWidget(model)); } };

const names = typeof document === "undefined" ? null : document.getElementById("elementgrad-start");
if (names) mount(document.getElementById("elementgrad"), JSON.parse(names.textContent), askServer);
