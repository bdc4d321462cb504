// The explorer's front end: one ES module, without a build step. `mount` puts it into an element, with a function that
// asks the session. It is the page of the server, which has the names in it, and the widget of a notebook.

// Elements and texts. Names and labels of the user's are text and never markup.
const make = (tag, options = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && !key.startsWith("aria")) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

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

const KEYS = [
  ["/", "search the names"], ["Arrow keys", "move in the tree or in a picture"], ["Enter", "choose the element or name"],
  ["+  −  0", "zoom a picture in, out, and back"], ["f", "zoom to the framed field"], ["Page Up, Page Down", "other channels of a picture"],
  ["Shift + arrows", "move a zoomed picture"], ["s", "take the tensor in the middle as the source"],
  ["t", "make the chosen source element the target"], ["w", "walk back to the strongest driver in the layer before"],
  ["[  ]", "back and forward"], [",  .", "previous and next example"], ["e", "explain"], ["c", "copy as code"],
  ["r", "download the report"], ["Esc", "cancel a read, or close this"],
];

// One picture of a tensor: tiles of cells on a canvas, with its slices, zoom, colour scale and the number under the
// pointer. `options`: label, onWindow (ask for another window), onPick (an element was chosen).
class Picture {
  constructor(app, options) {
    Object.assign(this, { app, options, data: null, row: null, view: {}, cursor: null, marked: null, field: null, mode: "overlay" });
    this.canvas = make("canvas", { tabIndex: 0, role: "application", "aria-roledescription": "picture of a tensor", className: "eg-canvas" });
    this.chips = make("div", { className: "eg-chips", role: "group", "aria-label": "Tokens" });
    this.tools = make("div", { className: "eg-tools" });
    this.readout = make("output", { className: "eg-readout", "aria-live": "polite" });
    this.scale = make("div", { className: "eg-scale" });
    this.notes = make("p", { className: "eg-notes" });
    this.stage = make("div", { className: "eg-stage" }, this.canvas);
    this.element = make("div", { className: "eg-picture" }, this.tools, this.chips, this.stage, this.readout, this.scale, this.notes);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.cursor = null; this.paint(); this.read(); });
    this.canvas.addEventListener("pointerdown", (event) => { this.grip = { x: event.clientX, y: event.clientY, cell: this.hit(event) }; });
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
    if (this.composite && tiles > 1) notes.push(this.gradient ? `at each pixel the largest gradient of ${tiles} channels` : `${tiles} channels in one picture`);
    this.notes.textContent = notes.map((note) => note[0].toUpperCase() + note.slice(1)).join(". ");
    this.canvas.setAttribute("aria-label", `${this.options.label()}: ${scale.description}. ${notes.join(". ")}`);
    this.makeTools();
    this.makeChips();
    this.resize();
    this.read();
  }

  get composite() { return this.row.layout.kind === "image"; }
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
    const { rows, columns } = this.size, first = cell.r * columns + cell.c;
    const size = (t) => { const slope = Math.abs(this.gradient[t * rows * columns + first]); return Number.isNaN(slope) ? Infinity : slope; };
    let best = cell.t;
    for (let t = 0; t < this.size.tiles; t += 1) if (size(t) > size(best)) best = t;
    return best === cell.t ? cell : { ...cell, t: best };
  }

  resize() {
    if (!this.data) return;
    const { rows, columns } = this.size, kind = this.row.layout.kind, count = this.composite ? 1 : this.size.tiles;
    // The stage has room for the ring of the focus on each side.
    const width = Math.max(120, (this.stage.clientWidth || 326) - 6), height = this.options.height();
    this.bars = rows === 1 && count === 1;
    let across = 1, side = 0, gap = count > 1 ? 6 : 0;
    if (this.bars) {
      this.geometry = { across: 1, gap: 0, width, height: columns === 1 ? 64 : 200, cell: [width / columns, 0] };
    } else {
      for (let tried = 1; tried <= count; tried += 1) {
        const down = Math.ceil(count / tried);
        const cell = Math.min((width - gap * (tried - 1)) / tried / columns, (height - gap * (down - 1)) / down / rows, 44);
        if (cell > side) { side = cell; across = tried; }
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
      this.geometry = { across, gap, cell, width: across * (cell[0] * columns + gap) - gap, height: down * (cell[1] * rows + gap) - gap };
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

  // The colours of one cell of a tile. Under a gradient the values are grey, so that all colour is that of the gradient,
  // and only as dark (or in a dark page as light) as lets its strongest colours stand out.
  shade(t, r, c) {
    const { scale, gradientScale } = this.data, span = scale.highest - scale.lowest || 1;
    const channels = this.composite && this.size.tiles >= 3 ? [0, 1, 2] : [t];
    const values = channels.map((channel) => this.values[this.at({ t: channel, r, c })]);
    const odd = values.find((value) => !Number.isFinite(value)), parts = values.map((value) => limit((value - scale.lowest) / span, 0, 1));
    if (this.drawn === "values") {
      if (odd !== undefined || !this.composite) return this.colour(odd ?? values[0], scale.limit);
      return [0, 1, 2].map((channel) => Math.round(255 * (parts[channel] ?? parts[0])));
    }
    const slope = this.gradient[this.at(this.strongest({ t, r, c }))], over = this.colour(slope, gradientScale.limit);
    if (this.drawn === "gradient" || !Number.isFinite(slope)) return over;
    const [low, high] = this.app.greys, mean = parts.reduce((sum, part) => sum + part, 0) / parts.length;
    const under = odd === undefined ? Array(3).fill(low + (high - low) * mean) : this.colour(odd, 1);
    const weight = Math.sqrt(limit(Math.abs(slope) / gradientScale.limit, 0, 1));
    return under.map((part, i) => Math.round(part * (1 - weight) + over[i] * weight));
  }

  makeBitmaps() {
    const { rows, columns } = this.size, count = this.composite ? 1 : this.size.tiles;
    return Array.from({ length: count }, (_, t) => {
      const image = new ImageData(columns, rows);
      for (let r = 0; r < rows; r += 1) for (let c = 0; c < columns; c += 1) {
        const at = 4 * (r * columns + c), [red, green, blue] = this.shade(t, r, c);
        image.data[at] = red; image.data[at + 1] = green; image.data[at + 2] = blue; image.data[at + 3] = 255;
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
    for (const value of numbers) if (Number.isFinite(value)) { top = Math.max(top, Math.min(value, end)); bottom = Math.max(bottom, Math.min(-value, end)); }
    const space = this.row.labels && cell > 12 ? 18 : 2;
    const unit = (height - space - 2) / (top + bottom || 1), zero = 1 + top * unit;
    context.fillStyle = this.app.style("--eg-line");
    context.fillRect(0, zero - 0.5, width, 1);
    for (let c = 0; c < columns; c += 1) {
      const value = numbers[c], part = Number.isFinite(value) ? limit(value / end, -1, 1) : 1;
      const size = Number.isFinite(value) ? Math.max(1, Math.abs(part) * end * unit) : zero;
      const [red, green, blue] = this.colour(Number.isFinite(value) ? Math.sign(part) * end * (0.4 + 0.6 * Math.abs(part)) : value, end);
      context.fillStyle = `rgb(${red} ${green} ${blue})`;
      if (value !== 0) context.fillRect(c * cell + (cell > 3 ? 1 : 0), part < 0 ? zero : zero - size, Math.max(0.75, cell - (cell > 3 ? 2 : 0)), size);
    }
    if (space === 2) return;
    Object.assign(context, { fillStyle: this.app.style("--eg-faint"), font: "12px system-ui, sans-serif", textAlign: "center" });
    for (let c = 0; c < columns; c += 1) context.fillText(this.app.start.labels[this.indexOf({ t: 0, r: 0, c })[this.row.layout.column]], (c + 0.5) * cell, height - 4, cell - 2);
  }

  // Rectangles are drawn twice, dark on light, so that they stand out from any colour.
  frame(context, x, y, width, height, thickness, colour) {
    context.lineWidth = thickness + 2;
    context.strokeStyle = this.app.style("--eg-paper");
    context.strokeRect(x, y, width, height);
    context.lineWidth = thickness;
    context.strokeStyle = colour;
    context.strokeRect(x, y, width, height);
  }

  outline(context, cell, thickness) {
    if (!cell) return;
    const { cell: [across, down], height } = this.geometry;
    const [x, y] = this.bars ? [0, 0] : this.origin(cell.t);
    this.frame(context, x + cell.c * across, this.bars ? 1 : y + cell.r * down, Math.max(across, 3), this.bars ? height - 2 : Math.max(down, 3), thickness, this.app.style("--eg-ink"));
  }

  paintField(context) {
    if (!this.field || !this.gradient) return;
    const { tile, row, column, fixed, example } = this.row.layout, { window, block } = this.data, { rows, columns } = this.size;
    const outside = [...fixed, ...(example === null ? [] : [example])].some((axis) => window.index[axis] < this.field[axis][0] || window.index[axis] >= this.field[axis][1]);
    if (outside) return;
    const ends = (axis, start, step, count) => axis === null ? [0, count] : this.field[axis].map((end) => limit((end - start) / step, 0, count));
    const [top, bottom] = ends(row, window.rows[0], block[0], rows), [left, right] = ends(column, window.columns[0], block[1], columns);
    if (bottom <= top || right <= left) return;
    const [wide, high] = this.geometry.cell, count = this.composite ? 1 : this.size.tiles;
    for (let t = 0; t < count; t += 1) {
      if (!this.composite && tile !== null && (window.tiles[0] + t < this.field[tile][0] || window.tiles[0] + t >= this.field[tile][1])) continue;
      const [x, y] = this.bars ? [0, 0] : this.origin(t), height = this.bars ? this.geometry.height - 2 : (bottom - top) * high;
      this.frame(context, x + left * wide + 1, y + (this.bars ? 1 : top * high + 1), Math.max(2, (right - left) * wide - 2), Math.max(2, height - 2), count > 12 ? 1 : 2, this.app.style("--eg-field"));
    }
  }

  hit(event) {
    if (!this.data) return null;
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const { across, gap, cell } = this.geometry, { rows, columns } = this.size, count = this.composite ? 1 : this.size.tiles;
    if (this.bars) return { t: 0, r: 0, c: limit(Math.floor(x / cell[0]), 0, columns - 1) };
    // Between two tiles, the cell that is nearest: what looks like a part of the picture must not be deaf.
    const nearest = (at, cells, side, tiles) => {
      const tile = limit(Math.floor((at + gap / 2) / (cells * side + gap)), 0, tiles - 1);
      return [tile, limit(Math.floor((at - tile * (cells * side + gap)) / side), 0, cells - 1)];
    };
    const [i, c] = nearest(x, columns, cell[0], across), [j, r] = nearest(y, rows, cell[1], Math.ceil(count / across)), t = j * across + i;
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
      const size = limit(direction > 0 ? Math.ceil((stop - start) / 2) : 2 * (stop - start), Math.min(2, shape[axis]), shape[axis]);
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
    const { rows, columns, tiles } = this.size, { across } = this.geometry, moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key in moves && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      const [down, right] = moves[event.key];
      if (event.shiftKey && this.zoomed) return this.pan(down * Math.ceil(rows / 4) * this.data.block[0], right * Math.ceil(columns / 4) * this.data.block[1]);
      const cell = this.cursor ? { ...this.cursor } : this.cellOf(this.marked) || { t: 0, r: 0, c: 0 };
      if (this.cursor) {
        cell.r += down; cell.c += right;
        const step = this.composite ? 0 : cell.c < 0 ? -1 : cell.c >= columns ? 1 : cell.r < 0 ? -across : cell.r >= rows ? across : 0;
        if (step && cell.t + step >= 0 && cell.t + step < tiles) {
          cell.t += step; cell.c = (cell.c + columns) % columns; cell.r = (cell.r + rows) % rows;
        }
        cell.r = limit(cell.r, 0, rows - 1); cell.c = limit(cell.c, 0, columns - 1);
      }
      this.cursor = this.strongest(cell);
      this.paint();
      return this.read();
    }
    const actions = { "+": () => this.zoom(1), "=": () => this.zoom(1), "-": () => this.zoom(-1), 0: () => this.zoom(0), PageDown: () => this.page(1), PageUp: () => this.page(-1) };
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
    const cell = this.cursor || this.cellOf(this.marked);
    if (cell && !this.cursor && !this.hasExactly(this.marked)) { this.readout.textContent = `${this.app.text(this.row, this.marked)} is one of several numbers in the framed cell; zoom in for it.`; return; }
    if (!cell) { this.readout.textContent = "Point at an element, or move to one with the arrow keys."; return; }
    const index = this.indexOf(cell), at = this.at(cell), label = this.labelOf(index);
    const parts = [`${this.app.text(this.row, index)} = ${show(this.values[at], this.data.narrow)}`];
    if (this.composite && this.size.tiles > 1) parts.push(`all channels ${Array.from({ length: this.size.tiles }, (_, t) => show(this.values[this.at({ ...cell, t })], this.data.narrow)).join(", ")}`);
    if (this.gradient) parts.push(`gradient ${show(this.gradient[at], this.data.narrowGradient)}`);
    if (label) parts.push(label);
    this.readout.textContent = parts.join(" · ");
  }

  labelOf(index) {
    const { start } = this.app, { kind, row, column, example } = this.row.layout;
    const text = kind === "tokens" ? this.texts(example === null ? 0 : index[example])[index[row === null ? column : row]] : null;
    const label = this.row.labels ? start.labels[index[column]] : null;
    return [text, label].filter((part) => part !== null && part !== undefined).map((part) => `“${part}”`).join(" → ");
  }

  texts(example) { return this.app.start.tokens[example] || this.app.start.tokens[0] || []; }

  makeTools() {
    const { window } = this.data, { fixed, tile } = this.row.layout, { shape } = this.row, focused = this.app.focused;
    const label = focused && this.tools.contains(focused) ? focused.getAttribute("aria-label") : null;
    const several = tile !== null && !this.composite && shape[tile] > 1;
    const number = (name, axis, value, onchange) => make("label", { className: "eg-axis" }, `${name} `, make("input", {
      type: "number", min: 0, max: shape[axis] - 1, value, "aria-label": name,
      onchange: (event) => onchange(limit(Math.round(Number(event.target.value) || 0), 0, shape[axis] - 1)),
    }), ` of ${shape[axis]}`);
    const button = (text, name, action, disabled = false) => make("button", { type: "button", title: name, "aria-label": name, disabled, onclick: action }, text);
    const tools = fixed.filter((axis) => shape[axis] > 1).map((axis) => number(`axis ${axis}`, axis, window.index[axis], (value) => {
      const index = [...window.index];
      index[axis] = value;
      this.ask({ index });
    }));
    if (several) {
      const one = window.tiles[1] - window.tiles[0] === 1;
      tools.push(make("span", { className: "eg-group" },
        button("‹", "previous channels", () => this.page(-1), window.tiles[0] === 0),
        one ? number("channel", tile, window.tiles[0], (value) => this.turnTo(value, value + 1)) : make("span", {}, `channels ${window.tiles[0]}–${window.tiles[1] - 1} of ${shape[tile]}`),
        button("›", "next channels", () => this.page(1), window.tiles[1] >= shape[tile])));
    }
    if (this.gradient && this.layered) {
      const modes = make("select", { "aria-label": "what is drawn", onchange: (event) => { this.mode = event.target.value; this.resize(); this.makeScale(); } },
        ...["overlay", "gradient", "values"].map((mode) => make("option", { value: mode, selected: mode === this.mode }, mode)));
      tools.push(modes);
    }
    const cells = this.size.rows * this.size.columns * this.size.tiles;
    if (cells > 1) tools.push(make("span", { className: "eg-group eg-zoom" }, button("+", "zoom in", () => this.zoom(1)), button("−", "zoom out", () => this.zoom(-1)), button("⤢", "show all", () => this.zoom(0)),
      this.hasSmallField ? button("▣", "zoom to the field (key f)", () => this.zoomToField()) : null));
    this.tools.replaceChildren(...tools);
    if (label) [...this.tools.querySelectorAll("[aria-label]")].find((tool) => tool.getAttribute("aria-label") === label)?.focus();
    this.makeScale();
  }

  makeScale() {
    const slopes = this.drawn !== "values", scale = slopes ? this.data.gradientScale : this.data.scale, grey = !slopes && this.composite;
    const strip = make("canvas", { width: 255, height: 1, className: "eg-strip", role: "presentation" }), context = strip.getContext("2d");
    for (let x = 0; x < 255; x += 1) {
      const [red, green, blue] = grey ? [x, x, x] : this.app.colours[2 * x];
      context.fillStyle = `rgb(${red} ${green} ${blue})`;
      context.fillRect(x, 0, 1, 1);
    }
    const [low, middle, high] = grey ? [scale.lowest, "", scale.highest] : [-scale.limit, "0", scale.limit];
    const word = { overlay: "gradient, over the values in grey", gradient: "gradient", values: "value" }[this.drawn];
    this.scale.replaceChildren(make("span", {}, brief(low)), make("span", { className: "eg-ramp" }, strip, make("span", {}, middle)), make("span", {}, brief(high)), make("span", { className: "eg-word" }, word));
    if (slopes && this.field) this.scale.append(make("span", { className: "eg-key" }, make("i", { className: "eg-frame" }), this.fieldText));
  }

  setField(field, exact) {
    this.field = field;
    if (field) {
      const { row, column } = this.row.layout, sizes = [row, column].filter((axis) => axis !== null).map((axis) => field[axis][1] - field[axis][0]);
      this.fieldText = exact ? `receptive field, ${sizes.join(" × ")}` : `box of gradients that are not zero, ${sizes.join(" × ")}`;
    }
    this.makeTools();
    this.paint();
  }

  makeChips() {
    const { kind, row, column, example } = this.row.layout;
    this.chips.hidden = kind !== "tokens";
    if (kind !== "tokens") return this.chips.replaceChildren();
    const axis = row === null ? column : row, texts = this.texts(example === null ? 0 : this.data.window.index[example]);
    const ends = row === null ? this.data.window.columns : this.data.window.rows, block = this.data.block[row === null ? 1 : 0];
    const numbers = this.gradient || this.values, scale = this.gradient ? this.data.gradientScale : this.data.scale;
    const best = new Map();
    for (let r = 0; r < this.size.rows; r += 1) for (let c = 0; c < this.size.columns; c += 1) {
      const at = ends[0] + (row === null ? c : r) * block, cell = { t: 0, r, c };
      if (!best.has(at) || Math.abs(numbers[this.at(cell)]) > Math.abs(numbers[this.at(best.get(at))])) best.set(at, cell);
    }
    return this.chips.replaceChildren(...texts.map((text, at) => {
      const cell = best.get(at), value = cell ? numbers[this.at(cell)] : 0, chosen = this.marked && this.marked[axis] === at;
      const chip = make("button", { type: "button", "aria-pressed": String(!!chosen), title: cell ? `largest in size: ${show(value, this.data.narrow)}` : "", onclick: () => cell && this.options.onPick(this.indexOf(cell)) }, text);
      if (this.gradient || row !== null) {
        const [red, green, blue] = this.colour(value, scale.limit);
        chip.style.setProperty("--chip", `rgb(${red} ${green} ${blue})`);
      }
      return chip;
    }));
  }
}

// The names as a tree, by the parts of their paths; drawn as a list of the rows that are open.
class Tree {
  constructor(app, onchoose) {
    Object.assign(this, { app, onchoose, query: "", thumbnails: new Map(), wanted: new Set() });
    this.search = make("input", { type: "search", placeholder: "Search, or a[0, 3, 2]", "aria-label": "Search the names, or go to a place", oninput: () => { this.query = this.search.value; this.draw(); } });
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
      const root = { title, path: kind, children: [], tensor: null, level: 1 }, nodes = new Map([["", root]]);
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
            const child = { title: part.replace(/[./]$/, "") || part, path: `${kind} ${key}`, children: [], tensor: null, level: depth + 2 };
            nodes.set(key, child);
            node.children.push(child);
          }
          node = nodes.get(key);
        });
        node.tensor = tensor;
      });
      root.count = count;
      root.open = !["parameter", "buffer"].includes(kind);
      const open = (node, depth) => { for (const child of node.children) { child.open = count <= 40 || depth < 1; open(child, depth + 1); } };
      open(root, 0);
      return root;
    }).filter((root) => root.children.length);
  }

  rows() {
    const query = this.query.replace(/\[.*/, "").trim().toLowerCase();
    if (query) {
      const found = this.app.start.names.map((row, tensor) => ({ title: row.name, path: `${row.kind} ${row.name}`, children: [], tensor, level: 1 }))
        .filter((node) => node.title.toLowerCase().includes(query));
      return found.slice(0, 300).concat(found.length > 300 ? [{ title: `${found.length - 300} more; search for more of the name`, path: "more", children: [], tensor: null, level: 1 }] : []);
    }
    const rows = [], visit = (node) => { rows.push(node); if (node.open) node.children.forEach(visit); };
    this.roots.forEach(visit);
    return rows;
  }

  draw() {
    const { start, state } = this.app, focused = this.list.contains(this.app.focused) ? this.app.focused.dataset.path : null;
    this.observer.disconnect();
    this.visible = this.rows();
    const items = this.visible.map((node) => {
      const row = node.tensor === null ? null : start.names[node.tensor], roles = [];
      if (row && node.tensor === state.source) roles.push("source");
      if (row && state.target && node.tensor === state.target.tensor) roles.push("target");
      const item = make("div", { role: "treeitem", tabIndex: -1, className: `eg-node${node.level === 1 && node.count ? " eg-root" : ""}`, "aria-level": String(node.level),
        "aria-selected": String(row !== null && node.tensor === state.hand), "aria-expanded": node.children.length ? String(!!node.open) : null,
        "aria-label": row ? `${row.name}, ${row.kind}, ${times(row.shape)} ${row.dtype}${roles.map((role) => `, ${role}`).join("")}` : `${node.title}, ${node.count || node.children.length} names`,
        onclick: (event) => this.click(node, event) });
      item.dataset.path = node.path;
      item.style.setProperty("--level", node.level);
      item.append(make("span", { className: "eg-twist" }, node.children.length ? (node.open ? "▾" : "▸") : ""));
      if (row) {
        item.dataset.tensor = node.tensor;
        item.append(this.thumbnail(node.tensor));
        this.observer.observe(item);
      }
      item.append(make("span", { className: "eg-name", title: row ? row.name : node.title }, node.title), ...roles.map((role) => make("span", { className: `eg-role eg-${role}` }, role)),
        make("span", { className: "eg-shape" }, row ? row.shape.join("×") || "one number" : String(node.count || "")));
      return item;
    });
    this.list.replaceChildren(...items);
    const selected = items.find((item) => item.getAttribute("aria-selected") === "true") || items[0];
    const again = items.find((item) => item.dataset.path === focused);
    if (again || selected) (again || selected).tabIndex = 0;
    if (again) again.focus({ preventScroll: true });
  }

  click(node, event) {
    if (node.children.length && (node.tensor === null || event.target.classList.contains("eg-twist"))) { node.open = !node.open; this.draw(); } else if (node.tensor !== null) this.onchoose(node.tensor);
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
    const go = (to) => { const item = items[limit(to, 0, items.length - 1)]; items.forEach((other) => { other.tabIndex = -1; }); item.tabIndex = 0; item.focus(); };
    const parent = () => { for (let up = at - 1; up >= 0; up -= 1) if (this.visible[up].level < node.level) return up; return at; };
    const actions = {
      ArrowDown: () => go(at + 1), ArrowUp: () => go(at - 1), Home: () => go(0), End: () => go(items.length - 1),
      ArrowRight: () => { if (node.children.length && !node.open) { node.open = true; this.draw(); } else if (node.children.length) go(at + 1); },
      ArrowLeft: () => { if (node.children.length && node.open) { node.open = false; this.draw(); } else go(parent()); },
      Enter: () => { if (node.tensor !== null) this.onchoose(node.tensor); else { node.open = !node.open; this.draw(); } },
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
    const context = canvas.getContext("2d"), image = new ImageData(picture.columns, picture.rows), steps = new Int8Array(bytes(picture.steps));
    const isImage = this.app.row(Number(canvas.dataset.thumb)).layout.kind === "image", low = Math.min(0, ...steps.filter((step) => step > -128));
    steps.forEach((step, at) => {
      const grey = Math.round((255 * (step - low)) / (127 - low));
      const [red, green, blue] = step === -128 ? this.app.nonfinite.NaN : isImage ? [grey, grey, grey] : this.app.colours[2 * step + 255];
      image.data.set([red, green, blue, 255], 4 * at);
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
    const answer = await this.app.request("thumbnails", { ask: "thumbnails", tensors, index: [this.app.state.example], edits: this.app.edits() }, true);
    if (!answer) { tensors.forEach((tensor) => this.thumbnails.delete(tensor)); return; }
    for (const [tensor, picture] of Object.entries(answer.thumbnails || {})) {
      this.thumbnails.set(Number(tensor), picture);
      this.list.querySelectorAll(`[data-thumb="${tensor}"]`).forEach((canvas) => this.paint(canvas, picture));
    }
    if (this.wanted.size) this.load();
  }

  repaint() { this.list.querySelectorAll("[data-thumb]").forEach((canvas) => this.paint(canvas, this.thumbnails.get(Number(canvas.dataset.thumb)))); }
  forget() { this.thumbnails.clear(); this.draw(); }
}

class App {
  constructor(root, start, ask) {
    Object.assign(this, { root, start, ask, slots: new Map(), history: [], position: -1, edited: new Map() });
    this.state = { hand: start.output, target: null, source: start.source, picked: null, example: 0, handView: {}, sourceView: {} };
    this.root.classList.add("elementgrad-explore");
    this.root.setAttribute("data-lm-suppress-shortcuts", "true");
    this.makePage();
    this.chooseTheme(this.remembered());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.chooseTheme(this.theme));
    new ResizeObserver(() => { this.hand.resize(); this.answer.resize(); }).observe(this.root);
    // Not `:hover`, which is what is under the pointer after the push.
    this.root.addEventListener("pointerdown", (event) => { this.pointed = this.drivers.contains(event.target); });
    this.root.addEventListener("pointermove", (event) => { if (event.movementX || event.movementY) this.pointed = this.drivers.contains(event.target); });
    const above = new ResizeObserver(() => this.keepDriversInPlace());
    for (const element of [this.hand.element, ...this.right.children]) if (element !== this.drivers) above.observe(element);
    this.root.tabIndex = -1;
    (this.alone ? document : this.root).addEventListener("keydown", (event) => this.key(event));
    this.open();
  }

  // Open with the largest element of the output as the target, so that there is an answer at once.
  async open() {
    this.tree.draw();
    const data = await this.showHand();
    if (!data || this.state.target || !this.row(this.state.hand).floating) return;
    let best = null;
    const { tiles, rows, columns } = this.hand.size;
    for (let t = 0; t < tiles; t += 1) for (let r = 0; r < rows; r += 1) for (let c = 0; c < columns; c += 1) {
      const cell = { t, r, c };
      if (!best || this.hand.values[this.hand.at(cell)] > this.hand.values[this.hand.at(best)]) best = cell;
    }
    if (best && !this.state.target) this.setTarget({ tensor: this.state.hand, index: this.hand.indexOf(best) });
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
  swap(element, ...children) {
    const had = element.contains(this.focused);
    element.replaceChildren(...children);
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
      if (answer.error && !quiet) this.complain(answer.error);
      return answer.error ? { failed: answer.error } : answer;
    } catch (error) {
      if (this.slots.get(slot) === entry) {
        this.slots.delete(slot);
        if (error.name !== "AbortError") this.complain("The session does not answer; is the program still running?");
      }
      return null;
    } finally { this.tell(); }
  }

  cancel() { for (const [slot, entry] of this.slots) { entry.controller.abort(); this.slots.delete(slot); } this.tell(); this.settle(); }
  settle() { this.hand.element.removeAttribute("aria-busy"); this.answer.element.removeAttribute("aria-busy"); }

  // Progress, once it takes longer than one would notice.
  tell() {
    clearTimeout(this.clock);
    this.root.toggleAttribute("data-busy", this.slots.size > 0);
    const entries = [...this.slots.entries()].filter(([, entry]) => !entry.quiet);
    const since = Math.min(...entries.map(([, entry]) => entry.started)), seconds = (performance.now() - since) / 1000;
    if (!entries.length || seconds < 0.3) this.progress.hidden = true;
    else {
      const said = entries.map(([, entry]) => entry.said).find(Boolean) || "reading";
      this.progressText.textContent = `${said[0].toUpperCase()}${said.slice(1)} (${entries.map(([slot]) => slot).join(", ")}), ${seconds.toFixed(1)} s`;
      this.progress.hidden = false;
    }
    if (entries.length) this.clock = setTimeout(() => this.tell(), 250);
  }

  complain(text) { this.alert.textContent = text; this.alertBox.hidden = false; }
  say(text) { this.status.textContent = text; clearTimeout(this.saying); this.saying = setTimeout(() => { this.status.textContent = ""; }, 2500); }

  makePage() {
    const button = (text, key, action, options = {}) => make("button", { type: "button", onclick: action, title: key ? `${text} (key ${key})` : text, "aria-keyshortcuts": key || null, ...options }, text);
    this.button = button;
    this.tree = new Tree(this, (tensor) => this.take(tensor));
    this.hand = new Picture(this, { label: () => `${this.row(this.state.hand).name}, ${this.row(this.state.hand).kind}, shape ${times(this.row(this.state.hand).shape)}`, height: () => 460,
      onWindow: (view) => { this.state.handView = view; this.showHand(); }, onPick: (index) => this.setTarget({ tensor: this.state.hand, index }) });
    this.answer = new Picture(this, { label: () => this.state.target ? `Gradient of ${this.elementText(this.state.target)} with respect to ${this.row(this.state.source).name}` : this.row(this.state.source).name, height: () => 320,
      onWindow: (view) => { this.state.sourceView = view; this.showAnswer(false); }, onPick: (index) => this.pick(index) });
    this.title = make("h2", { className: "eg-hand-title" });
    this.facts = make("p", { className: "eg-facts" });
    this.sourceSelect = make("select", { "aria-label": "Source", onchange: () => this.setSource(Number(this.sourceSelect.value)) });
    this.start.names.forEach((row, tensor) => { if (row.floating) this.sourceSelect.append(make("option", { value: tensor }, `${this.text(row)}  ${times(row.shape)}`)); });
    this.crumbs = make("ol", { className: "eg-crumbs", "aria-label": "Targets so far" });
    this.passedNote = make("p", { className: "eg-notes", hidden: true });
    this.backButton = button("Back", "[", () => this.travel(-1));
    this.forwardButton = button("Forward", "]", () => this.travel(1));
    this.question = make("h2", { className: "eg-question" });
    this.missing = make("div", { className: "eg-callout eg-bad", hidden: true });
    this.elementBox = make("section", { className: "eg-element", "aria-label": "The chosen element", hidden: true });
    this.drivers = make("div", { className: "eg-drivers" });
    // A list that is drawn anew between press and release would lose the click: it waits for the release.
    this.drivers.addEventListener("pointerdown", () => {
      this.released = new Promise((resolve) => {
        for (const kind of ["pointerup", "pointercancel"]) window.addEventListener(kind, () => setTimeout(resolve), { once: true });
      });
    });
    this.code = make("code", {});
    this.alert = make("span", {});
    this.alertBox = make("div", { className: "eg-callout eg-bad", role: "alert", hidden: true }, this.alert, button("Dismiss", "", () => { this.alertBox.hidden = true; }));
    this.status = make("span", { className: "eg-status", role: "status" });
    this.progressText = make("span", {});
    this.progress = make("div", { className: "eg-progress", role: "status", hidden: true }, make("i", { className: "eg-spin" }), this.progressText, button("Cancel", "Escape", () => this.cancel()));
    this.themeButton = button("Theme", "", () => this.chooseTheme({ auto: "light", light: "dark", dark: "auto" }[this.theme]));
    this.editBox = make("span", { className: "eg-edits" });
    const examples = this.makeExamples(), help = button("Keys", "?", () => this.help());
    const header = make("header", { className: "eg-header" }, make("h1", {}, this.start.title), make("span", { className: "eg-sub" }, `${{ torch: "PyTorch", tensorflow: "TensorFlow", jax: "JAX" }[this.start.framework]} · ${this.start.names.length} tensors`),
      examples, this.editBox, make("span", { className: "eg-space" }), this.status, help, this.themeButton);
    const centre = make("main", { className: "eg-centre", "aria-label": "The tensor in hand" }, this.title, this.facts,
      make("div", { className: "eg-actions" }, button("Use as source", "s", () => this.setSource(this.state.hand)), button("Copy as code", "", () => this.copy(true))), this.hand.element,
      make("p", { className: "eg-hint" }, "Click an element to make it the target."));
    const right = this.right = make("aside", { className: "eg-answer", "aria-label": "The answer" },
      make("div", { className: "eg-trail" }, this.backButton, this.forwardButton, this.crumbs), this.passedNote, this.question,
      make("label", { className: "eg-source-choice" }, make("span", {}, "by the source "), this.sourceSelect),
      make("div", { className: "eg-actions" }, button("Walk back", "w", () => this.walk()), button("Copy as code", "c", () => this.copy()), button("Download report", "r", () => this.report()), button("Explain", "e", () => this.explain())),
      this.missing, this.answer.element, make("pre", { className: "eg-code", tabIndex: 0, "aria-label": "The same as code" }, this.code), this.elementBox, this.drivers);
    this.root.replaceChildren(header, this.alertBox, make("div", { className: "eg-body" }, this.tree.element, centre, right), this.progress);
  }

  makeExamples() {
    const { examples, exampleLabels } = this.start;
    if (examples < 2) return null;
    this.exampleSelect = make("select", { "aria-label": "Example", onchange: () => this.setExample(Number(this.exampleSelect.value)) });
    for (let k = 0; k < Math.min(examples, 2000); k += 1) this.exampleSelect.append(make("option", { value: k }, exampleLabels[k] ? `${k}: ${exampleLabels[k]}` : String(k)));
    return make("label", { className: "eg-examples" }, "example ", this.button("‹", ",", () => this.setExample(this.state.example - 1), { "aria-label": "previous example" }), this.exampleSelect,
      this.button("›", ".", () => this.setExample(this.state.example + 1), { "aria-label": "next example" }), ` of ${examples}`);
  }

  // The index of the axes that are fixed: the example, and what the user chose for the others.
  indexFor(tensor, view) {
    const row = this.row(tensor), index = view.index && view.index.length === row.shape.length ? [...view.index] : row.shape.map(() => 0);
    if (row.layout.example !== null) index[row.layout.example] = this.state.example;
    return index;
  }

  async showHand() {
    const { hand, handView } = this.state, row = this.row(hand);
    this.title.textContent = this.text(row);
    this.facts.textContent = `${row.kind} · ${times(row.shape)} · ${row.dtype}`;
    this.hand.element.setAttribute("aria-busy", "true");
    const data = await this.request("tensor", { ask: "view", tensor: hand, index: this.indexFor(hand, handView), tiles: handView.tiles, rows: handView.rows, columns: handView.columns, edits: this.edits() });
    if (!data) return null;
    this.hand.element.removeAttribute("aria-busy");
    if (data.failed) return null;
    this.hand.marked = this.state.target && this.state.target.tensor === hand ? this.state.target.index : null;
    this.hand.set(row, data, handView);
    this.hand.paint();
    return data;
  }

  async showAnswer(fresh = true) {
    const { target, source, sourceView } = this.state, row = this.row(source);
    this.sourceSelect.value = String(source);
    if (!target) return;
    this.answer.element.setAttribute("aria-busy", "true");
    if (fresh) { this.slots.get("shares")?.controller.abort(); this.slots.get("explain")?.controller.abort(); }
    if (this.drivers.dataset.source !== String(source)) this.swap(this.drivers);  // the elements of another tensor
    const data = await this.request("gradient", { ask: "view", tensor: source, of: target, index: this.indexFor(source, sourceView), tiles: sourceView.tiles, rows: sourceView.rows, columns: sourceView.columns, edits: this.edits() });
    if (!data) return;
    this.answer.element.removeAttribute("aria-busy");
    if (data.failed) return;
    if (fresh) this.answer.field = null;
    this.answer.marked = this.state.picked;
    this.answer.set(row, data, sourceView);
    this.question.replaceChildren("What drives ", make("code", {}, data.of.text), make("span", { className: "eg-value" }, ` = ${show(data.of.value, data.of.narrow)}`));
    this.missing.hidden = !data.missing;
    this.missing.textContent = data.missing || "";
    this.root.dataset.shown = String(Number(this.root.dataset.shown || 0) + 1);
    if (!fresh) return;
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
    const widest = Math.max(...answer.drivers.map((driver) => Math.abs(Number(driver.gradient)) || 0), 0) || 1;
    const rows = answer.drivers.map((driver, place) => {
      const bar = make("i", { className: "eg-part" }), part = Math.round(100 * (Math.abs(Number(driver.gradient)) || 0) / widest);
      const line = make("tr", { className: Number(driver.gradient) < 0 ? "eg-below" : "eg-above", "aria-selected": String(sameIndex(driver.index, this.state.picked)) }, make("th", { scope: "row" }, String(place + 1)),
        make("td", {}, make("button", { type: "button", className: "eg-link", onclick: () => this.pick(driver.index) }, driver.text)),
        make("td", { className: "eg-number" }, show(driver.gradient, answer.narrow)), make("td", { className: "eg-number" }, show(driver.value, answer.narrowValues)), make("td", { className: "eg-bar" }, bar));
      line.style.setProperty("--part", `${part}%`);
      return line;
    });
    const count = answer.drivers.length, title = { 0: "No drivers", 1: "The only driver" }[count] || `Top ${count} drivers`;
    const some = { 0: "none has", 1: "1 has" }[answer.nonzero] || `${answer.nonzero} have`;
    this.swap(this.drivers, make("h3", {}, title), make("p", { className: "eg-notes" }, `Of ${answer.size} elements, ${some} a gradient that is not zero.`),
      make("table", {}, make("thead", {}, make("tr", {}, ...["", "element", "gradient", "value", ""].map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, ...rows)));
  }

  // `passed`: the layers that hand the target on, which a walk has stepped over.
  setTarget(target, source = this.state.source, remember = true, passed = []) {
    Object.assign(this.state, { target, source, picked: null, sourceView: source === this.state.source ? this.state.sourceView : {} });
    this.alertBox.hidden = true;
    if (this.hand.row) {
      this.hand.marked = this.hand.row === this.row(target.tensor) ? target.index : null;
      this.hand.paint();
      this.hand.read();
    }
    if (remember) this.remember(passed);
    this.tree.draw();
    return this.showAnswer();
  }

  setSource(source) {
    if (!this.row(source).floating) { this.complain(`${this.row(source).name} is of dtype ${this.row(source).dtype}, which has no gradients; choose another source.`); return; }
    Object.assign(this.state, { source, picked: null, sourceView: {} });
    if (this.state.target) this.remember();
    this.tree.draw();
    this.showAnswer();
  }

  take(tensor, view = {}) {
    if (view.index) this.showExampleOf(tensor, view.index);
    Object.assign(this.state, { hand: tensor, handView: view });
    this.tree.draw();
    return this.showHand();
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
    const move = (tensor, index) => { const axis = this.row(tensor).layout.example; return axis === null ? index : index.map((at, i) => (i === axis ? example : at)); };
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
    const shown = this.history.map((entry, at) => ({ ...entry, at })).filter(({ view, at }) => at === 0 || at === this.position || !sameElement(view.target, this.history[at - 1].view.target));
    const items = shown.slice(-8).flatMap(({ view, passed, at }) => [
      ...passed.map((element) => make("li", { className: "eg-passed" }, make("button", { type: "button", className: "eg-link", title: `${this.elementText(element)} is the same number: look at it`, onclick: () => this.look(element) }, `via ${this.row(element.tensor).name}`))),
      make("li", {}, make("button", { type: "button", className: "eg-link", "aria-current": at === this.position ? "step" : null, onclick: () => this.goTo(at) }, this.elementText(view.target))),
    ]);
    if (shown.length > 8) items.unshift(make("li", {}, `${shown.length - 8} earlier`));
    this.swap(this.crumbs, ...items);
    const { passed } = this.history[this.position];
    this.passedNote.hidden = !passed.length;
    if (passed.length) this.passedNote.textContent = `${this.elementText(this.history[this.position - 1].view.target)} is the same number as ${passed.map((element) => this.elementText(element)).join(" and ")}; the walk went on from there.`;
  }

  // Choose an element of the source: its number, shares, and why it is zero or missing.
  pick(index) {
    for (const slot of ["place", "walk"]) this.slots.get(slot)?.controller.abort();  // or their answer would take its place
    this.state.picked = index;
    this.updateCode();
    this.answer.marked = index;
    if (!this.answer.cellOf(index)) {
      this.showExampleOf(this.state.source, index);
      this.state.sourceView = { index };
      this.showAnswer(false).then(() => this.showElement());
    } else { this.answer.paint(); this.answer.read(); this.answer.makeChips(); this.showElement(); }
    this.drivers.querySelectorAll("tbody tr").forEach((row) => row.setAttribute("aria-selected", String(row.querySelector("button").textContent === this.text(this.row(this.state.source), index))));
  }

  // The value and gradient of an element of the source: in the picture, unless a larger number of its cell is there.
  async numbersOf(source, index) {
    this.slots.get("element")?.controller.abort();
    const { answer } = this, { tile, row, column } = this.row(source).layout, only = (axis) => axis === null ? undefined : [index[axis], index[axis] + 1];
    if (answer.hasExactly(index)) {
      const at = answer.at(answer.cellOf(index));
      return { value: answer.values[at], slope: answer.gradient ? answer.gradient[at] : null };
    }
    const data = await this.request("element", { ask: "view", tensor: source, of: this.state.target, index, tiles: only(tile), rows: only(row), columns: only(column), edits: this.edits() });
    if (!data || data.failed) return null;
    return { value: decode(data.values, data.narrow)[0], slope: data.gradient ? decode(data.gradient, data.narrowGradient)[0] : null };
  }

  async showElement() {
    const { target, source, picked } = this.state, { answer } = this;
    this.elementBox.hidden = !picked || !target;
    if (this.elementBox.hidden) { this.swap(this.elementBox); return; }
    const row = this.row(source), exact = await this.numbersOf(source, picked);
    if (!exact) return;
    const { value, slope } = exact;
    const number = make("p", { className: "eg-derivative" }, make("code", {}, `d ${this.elementText(target)} / d ${this.text(row, picked)}`), make("strong", { className: "eg-number" }, slope === null ? "no gradient" : show(slope, answer.data.narrowGradient)));
    const valueLine = make("p", { className: "eg-notes" }, `value ${show(value, answer.data.narrow)}`);
    const shares = make("div", { className: "eg-shares" }), verdict = make("div", { className: "eg-verdict" });
    const slider = row.editable ? this.makeSlider(source, picked, value) : null, again = this.elementBox.dataset.element === JSON.stringify([source, picked]);
    this.elementBox.dataset.element = JSON.stringify([source, picked]);
    const targeting = this.button("Make this the target", "t", () => this.follow());
    if (again && slider && this.slider) { this.slider.number.value = show(value, answer.data.narrow); slider.element = this.slider.element; } else if (slider) this.slider = slider; else this.slider = null;
    const focused = this.elementBox.contains(this.focused) ? this.focused : null;
    this.swap(this.elementBox, number, valueLine, ...(slider ? [this.slider.element] : []), make("div", { className: "eg-actions" }, targeting), verdict, shares);
    if (focused && this.elementBox.contains(focused)) focused.focus({ preventScroll: true });  // it was taken out and put back
    if (this.slider && this.slider.dragging) return;
    if (slope === null || slope === 0 || !Number.isFinite(slope)) { this.explain(); if (slope === null) return; }
    const found = await this.request("shares", { ask: "shares", tensor: source, index: picked, of: target, edits: this.edits() }, false);
    if (!found) return;
    if (found.failed) { this.alertBox.hidden = true; shares.replaceChildren(make("p", { className: "eg-notes" }, `Shares: ${found.failed}`)); return; }
    const hasLines = found.shares.some((share) => share.where);  // a model of ready-made layers has none
    const heads = ["operation", ...(hasLines ? ["line"] : []), "share"], rows = [...found.shares, { operation: "total", value: found.total }];
    shares.replaceChildren(make("h3", {}, "Shares by path"), make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
      make("tbody", {}, ...rows.map((share) => make("tr", {}, make("th", { scope: "row" }, share.operation), hasLines ? make("td", {}, share.where || "") : null, make("td", { className: "eg-number" }, show(share.value, found.narrow)))))));
  }

  makeSlider(tensor, index, value) {
    const { scale } = this.answer.data, span = Math.max(scale.highest - scale.lowest, Math.abs(value), 1e-3) || 1;
    const low = Math.min(scale.lowest, value) - 0.5 * span, high = Math.max(scale.highest, value) + 0.5 * span, key = JSON.stringify([tensor, index]);
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
    slider.range = make("input", { type: "range", min: low, max: high, step: "any", value, "aria-label": `value of ${this.text(this.row(tensor), index)}`, oninput: () => set(Number(slider.range.value), false), onchange: () => set(Number(slider.range.value), true) });
    slider.range.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (step) { event.preventDefault(); set(limit(Number((Number(slider.range.value) + (step * span) / 20).toPrecision(6)), low, high), true); }
    });
    slider.number = make("input", { type: "number", step: "any", value: show(value, this.answer.data.narrow), "aria-label": "value as a number", onchange: () => set(Number(slider.number.value), true) });
    slider.element = make("div", { className: "eg-slider" }, make("span", {}, "set it to"), slider.range, slider.number);
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
    const cell = this.answer.cellOf(this.state.picked), strong = this.elementBox.querySelector(".eg-derivative strong");
    if (strong && this.answer.gradient && this.answer.hasExactly(this.state.picked)) strong.textContent = show(this.answer.gradient[this.answer.at(cell)], this.answer.data.narrowGradient);
  }

  drawEdits() {
    const count = this.edited.size;
    this.editBox.replaceChildren(...(count ? [`${count} ${count === 1 ? "element is" : "elements are"} edited `, this.button("Reset", "", () => { this.edited.clear(); this.drawEdits(); this.slider = null; delete this.elementBox.dataset.element; this.refresh(true); })] : []));
  }

  // Make the chosen element the target, by the layer before it.
  async follow() {
    const { picked, source } = this.state;
    if (!picked) { this.walk(); return; }
    const target = { tensor: source, index: picked }, isLayer = this.row(source).kind === "activation";
    const step = isLayer ? await this.request("walk", { ask: "walk", of: target, edits: this.edits() }, true) : { tensor: source };
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
    const isLast = !["activation", "output"].includes(this.row(step.tensor).kind);
    this.say(`The strongest driver is ${this.elementText({ tensor: step.tensor, index: step.index })}${isLast ? ", where the walk ends" : ""}`);
  }

  async explain() {
    const { target, source, picked } = this.state;
    if (!target) return;
    const found = await this.request("explain", { ask: "explain", tensor: source, of: target, index: picked || undefined, edits: this.edits() });
    if (!found || found.failed) return;
    const good = found.verdict === "flows" && !found.cause;
    const lines = [found.where ? `where: ${found.where}` : null, ...found.evidence.map((fact) => `seen: ${fact}`), found.fix ? `fix: ${found.fix}` : null].filter(Boolean);
    const box = make("div", { className: `eg-callout ${good ? "eg-good" : found.verdict === "zero" ? "eg-odd" : "eg-bad"}` }, make("p", { className: "eg-sentence" }, found.sentence), ...lines.map((line) => make("p", {}, line)));
    const place = picked ? this.elementBox.querySelector(".eg-verdict") : null;
    if (place) place.replaceChildren(box);
    else { this.elementBox.hidden = false; this.swap(this.elementBox, make("div", { className: "eg-verdict" }, box)); }
  }

  async updateCode() {
    const { target, source, picked } = this.state;
    const answer = await this.request("code", { ask: "code", tensor: source, of: target, index: picked || undefined, edits: this.edits() }, true);
    if (answer && !answer.failed) this.code.textContent = answer.code;
  }

  async copy(hand = false) {
    const { target, source, picked } = this.state;
    if (!hand && !target) return;
    const message = hand ? { ask: "code", tensor: this.state.hand, edits: this.edits() } : { ask: "code", tensor: source, of: target, index: picked || undefined, edits: this.edits() };
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
    const { target, source, picked } = this.state;
    if (!target) return;
    const answer = await this.request("report", { ask: "report", tensor: source, of: target, index: picked || undefined, edits: this.edits() });
    if (!answer || answer.failed) return;
    const link = make("a", { href: URL.createObjectURL(new Blob([answer.html], { type: "text/html" })), download: answer.file });
    this.root.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 2000);
    this.say("Report downloaded");
  }

  async find(text) {
    if (!text) return;
    const exact = this.start.names.findIndex((row) => row.name === text);
    const place = exact >= 0 ? { tensor: exact, index: null } : await this.request("place", { ask: "find", text }, !text.includes("["));
    if (!place) return;
    if (place.failed) { const first = this.tree.visible.find((node) => node.tensor !== null); if (first && !text.includes("[")) this.take(first.tensor); return; }
    this.alertBox.hidden = true;
    this.tree.search.value = this.tree.query = "";
    this.take(place.tensor, { index: place.index || undefined });
    this.tree.reveal(place.tensor);
    this.hand.canvas.focus({ preventScroll: true });
    if (place.index) this.setTarget({ tensor: place.tensor, index: place.index });
  }

  help() {
    this.dialog?.remove();
    this.dialog = make("dialog", { className: "eg-dialog", "aria-label": "Keys" }, make("h2", {}, "Keys"), make("dl", {}, ...KEYS.flatMap(([key, text]) => [make("dt", {}, make("kbd", {}, key)), make("dd", {}, text)])), this.button("Close", "Escape", () => this.dialog.close()));
    this.root.append(this.dialog);
    this.dialog.showModal();
  }

  key(event) {
    event.stopPropagation();  // a notebook has shortcuts of its own
    const typing = /^(input|select|textarea)$/i.test(event.target.tagName);
    if (event.key === "Escape" && !this.dialog?.open) this.cancel();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || this.dialog?.open) return;
    const actions = {
      "/": () => this.tree.search.focus(), s: () => this.setSource(this.state.hand), t: () => this.follow(), w: () => this.walk(), "[": () => this.travel(-1), "]": () => this.travel(1),
      ",": () => this.setExample(this.state.example - 1), ".": () => this.setExample(this.state.example + 1), e: () => this.explain(), f: () => this.answer.zoomToField(), c: () => this.copy(), r: () => this.report(), "?": () => this.help(),
    };
    if (event.key in actions) { event.preventDefault(); actions[event.key](); }
  }

  remembered() { try { const theme = localStorage.getItem("elementgrad-theme"); return ["light", "dark"].includes(theme) ? theme : "auto"; } catch { return "auto"; } }

  chooseTheme(theme) {
    this.theme = theme;
    const host = document.body.dataset.jpThemeLight, code = document.body.className;
    const hosted = host !== undefined ? host === "false" : code.includes("vscode-dark") ? true : code.includes("vscode-light") ? false : matchMedia("(prefers-color-scheme: dark)").matches;
    const dark = theme === "dark" || (theme === "auto" && hosted);
    this.root.dataset.theme = dark ? "dark" : "light";
    if (this.alone) document.body.dataset.theme = this.root.dataset.theme;
    this.themeButton.textContent = `Theme: ${theme}`;
    this.colours = makeColours(this.start.colours[dark ? "dark" : "light"]);
    this.greys = dark ? [16, 120] : [165, 255];
    this.nonfinite = Object.fromEntries(Object.entries(this.start.nonfinite).map(([kind, colour]) => [kind, hex(colour)]));
    try { localStorage.setItem("elementgrad-theme", theme); } catch { /* a notebook may have no storage */ }
    for (const picture of [this.hand, this.answer]) if (picture.data) { picture.resize(); picture.makeScale(); picture.makeChips(); }
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
  const response = await fetch(location.href, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(message), signal, credentials: "omit" });
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
