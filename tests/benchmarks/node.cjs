// graphile-worker and pg-boss: `node node.cjs PEER install | single | fill N | drain N | share`, spoken to as the
// others. `share` drains beside other processes (graphile-worker only): it ends when it got nothing for a while.
"use strict";
const readline = require("node:readline");

const URL = process.env.DATABASE_URL;
const SECONDS = 2;
const IDLE_SECONDS = 2;
const [peer, way, argument] = process.argv.slice(2);
const tasks = Number(argument || 0);
const now = () => Number(process.hrtime.bigint()) / 1e9;

function graphile() {
  const { run, makeWorkerUtils } = require("graphile-worker");
  const quiet = new (require("graphile-worker").Logger)(() => () => {});
  let utils;
  return {
    async open() { utils = await makeWorkerUtils({ connectionString: URL, logger: quiet }); },
    async install() { await utils.migrate(); },
    async single() { await utils.addJob("other", { number: 1 }); },
    async fill() {
      for (let from = 0; from < tasks; from += 5000) {
        const size = Math.min(5000, tasks - from);
        await utils.addJobs(Array.from({ length: size }, (_, i) => ({ identifier: "nothing", payload: { number: from + i } })));
      }
    },
    async drain() {
      let done = 0, finished;
      this.last = now();
      const all = new Promise((resolve) => { finished = resolve; });
      const idle = () => { this.last = now(); if (done === tasks) finished(); };
      if (!tasks) setInterval(() => { if (now() - this.last > IDLE_SECONDS) finished(); }, 50);
      const runner = await run({
        preset: { worker: { connectionString: URL, concurrentJobs: 24, maxPoolSize: 10, logger: quiet, pollInterval: 200,
          localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 } },
        taskList: { nothing: () => { done += 1; idle(); } }, noHandleSignals: true,
      });
      await all;
      await runner.stop();
      return done;
    },
  };
}

function boss() {
  const loaded = require("pg-boss");
  const PgBoss = loaded.PgBoss || loaded.default || loaded;
  const client = new PgBoss({ connectionString: URL, supervise: false, schedule: false });
  return {
    async open() { await client.start(); },
    async install() { await client.createQueue("nothing"); await client.createQueue("other"); },
    async single() { await client.send("other", { number: 1 }); },
    async fill() {
      for (let from = 0; from < tasks; from += 5000) {
        const size = Math.min(5000, tasks - from);
        const jobs = Array.from({ length: size }, (_, i) => ({ name: "nothing", data: { number: from + i } }));
        await (client.insert.length > 1 ? client.insert("nothing", jobs) : client.insert(jobs));
      }
    },
    // work() waits between two batches; a loop of its own calls is the fastest way it offers.
    async drain() {
      let done = 0;
      for (;;) {
        const jobs = await client.fetch("nothing", { batchSize: 500 });
        if (!jobs || !jobs.length) return done;
        await client.complete("nothing", jobs.map((job) => job.id));
        done += jobs.length;
      }
    },
  };
}

async function main() {
  const queue = { "graphile-worker": graphile, "pg-boss": boss }[peer]();
  await queue.open();
  if (way === "single") await queue.single();
  process.stdout.write("READY\n");
  await new Promise((resolve) => readline.createInterface({ input: process.stdin }).once("line", resolve));
  const cpu = process.cpuUsage(), began = now();
  let done = 0;
  if (way === "single") for (; now() < began + SECONDS; done += 1) await queue.single();
  else done = (await queue[way === "share" ? "drain" : way]()) || 0;
  const ended = way === "share" ? queue.last : now();
  const used = process.cpuUsage(cpu);
  process.stdout.write(JSON.stringify({ tasks: done, began, ended, cpu: (used.user + used.system) / 1e6 }) + "\n", () => process.exit(0));
}

main().catch((error) => { process.stderr.write(`${error.stack}\n`); process.exit(1); });
