"use strict";
for (const plot of document.querySelectorAll(".plot")) {
  const chart = plot.querySelector("svg");
  const data = JSON.parse(plot.querySelector("script").textContent);
  const tip = document.createElement("div");
  const cursor = document.createElementNS(chart.namespaceURI, "line");
  tip.className = "tip";
  cursor.setAttribute("class", "cursor");
  const nearest = (xs, step) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < step) low = middle; else high = middle; }
    return Math.abs(xs[low] - step) <= Math.abs(xs[high] - step) ? low : high;
  };
  const hide = () => { tip.remove(); cursor.remove(); };
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) * data.width / box.width;
    const share = (x - data.left) / (data.right - data.left);
    if (share < 0 || share > 1) return hide();
    const step = data.range[0] + share * (data.range[1] - data.range[0]);
    const spread = (data.range[1] - data.range[0]) / 40;
    tip.replaceChildren();
    const row = (name, text) => {
      const line = document.createElement("div"), label = document.createElement("span"), number = document.createElement("b");
      label.textContent = name; number.textContent = text; line.append(label, number); tip.append(line);
    };
    row(data.axis, String(Math.round(step)));
    for (const series of data.series) {
      const index = nearest(series.x, step);
      if (series.x.length && Math.abs(series.x[index] - step) <= spread) row(series.name, series.text[index]);
    }
    for (const [name, value] of [["x1", x], ["x2", x], ["y1", data.top], ["y2", data.bottom]]) cursor.setAttribute(name, value);
    if (!cursor.isConnected) { chart.append(cursor); plot.append(tip); }
    const left = event.clientX - plot.getBoundingClientRect().left + plot.scrollLeft;
    const flip = event.clientX - box.left > box.width / 2;
    tip.style.left = flip ? "" : left + 14 + "px";
    tip.style.right = flip ? plot.clientWidth - left + 14 + "px" : "";
  });
}
