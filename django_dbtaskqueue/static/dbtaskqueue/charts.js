/* Draws each chart from its table twin: <div class="dbtq-chart" data-table="id-of-the-table">. */
(function () {
    "use strict";
    const dashes = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
    const drawn = new Map();
    const labels = new Map();
    const steps = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
        3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000, 1728000, 4320000, 8640000];

    function colour(name) {
        return window.getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    }

    /* Where a row stands: <time datetime="..."> in seconds since 1970, or <data value="..."> as it is. */
    function place(row) {
        const one = row.querySelector("time, data");
        return one.dateTime === undefined ? Number(one.value) : Date.parse(one.dateTime) / 1000;
    }

    function read(table) {
        const rows = Array.from(table.querySelectorAll("tbody tr")).reverse();
        const times = rows.map(place);
        const heads = Array.from(table.querySelectorAll("thead th")).slice(1);
        const columns = heads.map((_, at) => rows.map((row) => {
            const value = row.children[at + 1].dataset.value;
            return value === "" ? null : Number(value);
        }));
        const labels = new Map(rows.map((row, at) => [times[at], row.querySelector("time, data").textContent]));
        const isTime = table.querySelector("tbody time") !== null;
        return {heads: heads, data: [times, ...columns], isTime: isTime, labels: labels, word: table.querySelector("thead th").textContent};
    }

    /* As durations.py writes it: two units, or one with three digits. */
    function duration(seconds) {
        const parts = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];
        const at = parts.findIndex(([, size]) => seconds >= size);
        if (at === -1) return seconds ? Number((seconds * 1000).toPrecision(3)) + "ms" : "0s";
        if (at === 3) return Number(seconds.toPrecision(3)) + "s";
        const rest = Math.floor(seconds % parts[at][1] / parts[at + 1][1]);
        return Math.floor(seconds / parts[at][1]) + parts[at][0] + (rest ? rest + parts[at + 1][0] : "");
    }

    function written(value, unit) {
        return unit === "duration" ? duration(value) : value.toLocaleString() + unit;
    }

    /* Bars stand on each other: each series holds the sum of itself and those after it, drawn from the tallest. */
    function stacked(columns) {
        return columns.map((_, at) => columns[0].map((_, row) => columns.slice(at).reduce((sum, one) => sum + one[row], 0)));
    }

    function axis(unit) {
        const ink = colour("--body-quiet-color"), grid = colour("--hairline-color");
        return {
            stroke: ink, grid: {stroke: grid, width: 1}, ticks: {stroke: grid, width: 1}, size: 64,
            values: (_, splits) => splits.map((value) => value === null ? "" : written(value, unit)),
            ...(unit === "duration" ? {incrs: steps} : {}),
        };
    }

    /* The axis of a report: days where it is long, else days and hours, in UTC; shares of tasks in percent. */
    function along(found) {
        return (_, splits, axis, space, step) => splits.map((value) => {
            if (!found.isTime) return value + " %";
            const text = new Date(value * 1000).toISOString();
            return step >= 86400 ? text.slice(5, 10) : text.slice(5, 10) + " " + text.slice(11, 16);
        });
    }

    /* A value between two gaps: a line has no length there, so it is drawn as a point. */
    function alone(values) {
        return values.flatMap((value, at) => value !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null ? [at] : []);
    }

    /* A line and a name for each <time> of the list after the chart: a poller of a new release started. */
    function drawMarks(box) {
        return (plot) => document.querySelectorAll("#" + box.dataset.marks + " time").forEach((mark) => {
            const x = plot.valToPos(Date.parse(mark.dateTime) / 1000, "x", true);
            if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) return;
            const draw = plot.ctx;
            draw.save();
            draw.strokeStyle = draw.fillStyle = colour("--body-quiet-color");
            draw.setLineDash([4, 4]);
            draw.beginPath();
            draw.moveTo(x, plot.bbox.top);
            draw.lineTo(x, plot.bbox.top + plot.bbox.height);
            draw.stroke();
            draw.textAlign = "right";
            draw.fillText(mark.dataset.mark, x - 4, plot.bbox.top + 12 * uPlot.pxRatio);
            draw.restore();
        });
    }

    function options(box, found, unit) {
        const report = "utc" in box.dataset, bars = "bars" in box.dataset;
        const time = Object.assign(axis(""), {size: 32, space: report ? 90 : 50});
        /* The table's own texts: the server's time zone, the site's language. */
        time.values = report ? along(found) : (_, splits) => splits.map((value) => labels.get(box).get(value) || "");
        const look = (ink) => bars ? {fill: ink, paths: uPlot.paths.bars({size: [0.8, 60]})} : {spanGaps: report};
        return {
            width: Math.max(box.clientWidth, 200), height: 220,
            cursor: {drag: {x: false, y: false}},
            ...("marks" in box.dataset ? {hooks: {draw: [drawMarks(box)]}} : {}),
            ...(report ? {tzDate: (stamp) => uPlot.tzDate(new Date(stamp * 1000), "Etc/UTC")} : {}),
            scales: {
                x: {time: found.isTime, range: (plot, low, high) => plot.data[0].length === 1 ? [low - 1799, low + 1799] : [low, high]},
                y: {range: (_, low, high) => [0, report ? high * 1.1 || 1 : Math.max(high * 1.1, 1)]},
            },
            axes: [time, axis(unit)],
            series: [{label: found.word, value: (_, value) => labels.get(box).get(value) || ""}, ...found.heads.map((head, at) => ({
                label: head.textContent, stroke: colour(head.dataset.colour), width: bars ? 0 : 2, dash: bars ? [] : dashes[at % dashes.length],
                points: {show: !bars, size: 6, filter: (plot, series) => alone(plot.data[series])}, ...look(colour(head.dataset.colour)),
                value: (_, value, series, row) => {
                    if (row === null || row === undefined) return "";  /* the pointer is elsewhere */
                    const own = bars && value !== null ? found.data[series][row] : value;
                    return own === null ? "–" : written(own, unit);
                },
            }))],
        };
    }

    function draw(box, anew) {
        const table = document.getElementById(box.dataset.table);
        if (!table) return;
        const found = read(table);
        const plot = drawn.get(box);
        const data = "bars" in box.dataset ? [found.data[0], ...stacked(found.data.slice(1))] : found.data;
        if (plot && !anew && found.data[0].length) { labels.set(box, found.labels); plot.setData(data); return; }
        if (plot) { plot.destroy(); drawn.delete(box); }
        if (!found.data[0].length) return;
        labels.set(box, found.labels);
        drawn.set(box, new uPlot(options(box, found, box.dataset.unit || ""), data, box));
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
