"""A wrong time of day for a process: a library that shifts what the process reads, and leaves monotonic clocks alone.

The process is started with the variables that ``shifted`` returns. Programs that it starts are shifted, too.
"""

import shutil
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift(void) {
    const char *seconds = getenv("FAULTS_CLOCK_S");
    return seconds ? atol(seconds) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, found);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) found->tv_sec += shift();
    return code;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    int (*real)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int code = real(found, zone);
    if (!code) found->tv_sec += shift();
    return code;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""


def library(folder: Path) -> Path | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source, built = folder / "clock.c", folder / "clock.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True, capture_output=True)
    return built


def shifted(built: Path | None, seconds: float) -> dict[str, str]:
    """Return the environment of a process whose clock is wrong by so many seconds."""
    return {} if built is None else {"LD_PRELOAD": str(built), "FAULTS_CLOCK_S": str(round(seconds))}
