/* Draws each chart from its table twin: <div class="dbtq-chart" data-table="id-of-the-table">. */
(function () {
    "use strict";
    const dashes = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
    const drawn = new Map();
    const labels = new Map();

    function colour(name) {
        return window.getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    }

    function read(table) {
        const rows = Array.from(table.querySelectorAll("tbody tr")).reverse();
        const times = rows.map((row) => Date.parse(row.querySelector("time").dateTime) / 1000);
        const heads = Array.from(table.querySelectorAll("thead th")).slice(1);
        const columns = heads.map((_, at) => rows.map((row) => {
            const value = row.children[at + 1].dataset.value;
            return value === "" ? null : Number(value);
        }));
        const labels = new Map(rows.map((row, at) => [times[at], row.querySelector("time").textContent]));
        return {heads: heads, data: [times, ...columns], labels: labels, word: table.querySelector("thead th").textContent};
    }

    function axis(unit) {
        const ink = colour("--body-quiet-color"), grid = colour("--hairline-color");
        return {
            stroke: ink, grid: {stroke: grid, width: 1}, ticks: {stroke: grid, width: 1}, size: 64,
            values: (_, splits) => splits.map((value) => value === null ? "" : value.toLocaleString() + unit),
        };
    }

    function options(box, found, unit) {
        const time = Object.assign(axis(""), {size: 32});
        /* The table's own texts: the server's time zone, the site's language. */
        time.values = (_, splits) => splits.map((value) => labels.get(box).get(value) || "");
        return {
            width: Math.max(box.clientWidth, 200), height: 220,
            cursor: {drag: {x: false, y: false}},
            scales: {y: {range: (_, low, high) => [0, Math.max(high * 1.1, 1)]}},
            axes: [time, axis(unit)],
            series: [{label: found.word, value: (_, value) => labels.get(box).get(value) || "–"}, ...found.heads.map((head, at) => ({
                label: head.textContent, stroke: colour(head.dataset.colour), width: 2, dash: dashes[at % dashes.length],
                points: {show: found.data[0].length < 3},
                value: (_, value) => value === null ? "–" : value.toLocaleString() + unit,
            }))],
        };
    }

    function draw(box, anew) {
        const table = document.getElementById(box.dataset.table);
        if (!table) return;
        const found = read(table);
        const plot = drawn.get(box);
        if (plot && !anew && found.data[0].length) { labels.set(box, found.labels); plot.setData(found.data); return; }
        if (plot) { plot.destroy(); drawn.delete(box); }
        if (!found.data[0].length) return;
        labels.set(box, found.labels);
        drawn.set(box, new uPlot(options(box, found, box.dataset.unit || ""), found.data, box));
    }

    function all(anew) {
        document.querySelectorAll(".dbtq-chart").forEach((box) => draw(box, anew));
    }

    all(true);
    document.addEventListener("dbtq:refreshed", () => all(false));
    window.addEventListener("resize", () => all(true));
    new MutationObserver(() => all(true)).observe(document.documentElement, {attributeFilter: ["data-theme"]});
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => all(true));
})();
