(() => {
  "use strict";
  const show = (element) => { element.hidden = false; };

  // The theme: as the system has it, until somebody chooses.
  const button = document.getElementById("theme"), root = document.documentElement;
  const themes = ["auto", "light", "dark"];
  const remembered = () => { try { return localStorage.getItem("elementgrad-theme"); } catch { return null; } };
  const choose = (theme) => {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = "Theme: " + theme;
    try { localStorage.setItem("elementgrad-theme", theme); } catch { /* a file may have no storage */ }
  };
  choose(themes.includes(remembered()) ? remembered() : "auto");
  button.addEventListener("click", () => {
    choose(themes[(themes.indexOf(root.dataset.theme || "auto") + 1) % 3]);
  });
  show(button);

  // Numbers: the .npy file is in the page, and the table is made of it when it is asked for.
  const bytes = (link) => Uint8Array.from(atob(link.href.split("base64,")[1]), (sign) => sign.charCodeAt(0));
  const single = (value) => {
    for (let digits = 1; digits < 9; digits += 1) {
      const text = value.toPrecision(digits);
      if (Math.fround(Number(text)) === value) return String(Number(text));
    }
    return String(Number(value.toPrecision(9)));
  };
  const written = (value, narrow) => {
    if (Number.isNaN(value)) return "nan";
    if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
    return Object.is(value, -0) ? "-0" : narrow ? single(value) : String(value);
  };
  const csv = (link) => {
    const data = bytes(link), view = new DataView(data.buffer);
    const start = 10 + view.getUint16(8, true);
    const header = new TextDecoder().decode(data.subarray(10, start));
    const shape = /'shape': \(([^)]*)\)/.exec(header)[1].split(",").map((size) => size.trim()).filter(Boolean).map(Number);
    const narrow = header.includes("<f4"), width = narrow ? 4 : 8;
    const count = shape.reduce((all, size) => all * size, 1);
    const lines = [[...shape.map((_, axis) => "axis" + axis), "gradient"].join(",")];
    for (let position = 0; position < count; position += 1) {
      let rest = position;
      const where = shape.map(() => 0);
      for (let axis = shape.length - 1; axis >= 0; axis -= 1) {
        where[axis] = rest % shape[axis];
        rest = Math.floor(rest / shape[axis]);
      }
      const at = start + position * width;
      lines.push([...where, written(narrow ? view.getFloat32(at, true) : view.getFloat64(at, true), narrow)].join(","));
    }
    return lines.join("\n") + "\n";
  };

  const copy = async (text, said) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    said("Copied");
  };
  for (const files of document.querySelectorAll(".files")) {
    const status = files.querySelector(".said"), made = "npy" in files.dataset;
    const link = files.querySelector("a");
    const text = () => made ? csv(link) : new TextDecoder().decode(bytes(link));
    const said = (words) => { status.textContent = words; setTimeout(() => { status.textContent = ""; }, 2000); };
    const copying = files.querySelector(".copy");
    copying.addEventListener("click", () => copy(text(), said));
    show(copying);
    if (made) {
      const saving = files.querySelector("button.csv");
      saving.addEventListener("click", () => {
        const other = document.createElement("a");
        other.href = URL.createObjectURL(new Blob([text()], { type: "text/csv" }));
        other.download = files.dataset.name + ".csv";
        other.click();
        setTimeout(() => URL.revokeObjectURL(other.href), 1000);
      });
      show(saving);
    }
  }
  for (const copying of document.querySelectorAll(".copy-code")) {
    const words = copying.textContent;
    copying.addEventListener("click", () => copy(copying.previousElementSibling.textContent, (said) => {
      copying.textContent = said;
      setTimeout(() => { copying.textContent = words; }, 2000);
    }));
    show(copying);
  }
})();
