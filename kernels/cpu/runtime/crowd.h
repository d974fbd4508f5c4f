// How many threads to do without while other processes want the same cores.
//
// An operation ends with its last task. When the thread that holds it loses its core for a time slice, all others wait
// for milliseconds, at every operation: then fewer threads are faster. Results don't depend on their number.
#pragma once
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

namespace llmx_pool {

constexpr int64_t MS = 1000000;

inline int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1000 * MS * t.tv_sec + t.tv_nsec;
}

// Nanoseconds that a thread was ready to run and had no core, as Linux counts them.
class Delay {
 public:
  void open() {  // of the thread that calls
    if (file >= 0) close(file);
    file = ::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    since_last();
  }
  int64_t since_last() {  // 0 where the system doesn't say
    char text[96];
    const ssize_t length = file < 0 ? 0 : pread(file, text, sizeof text - 1, 0);
    if (length <= 0) return 0;
    text[length] = 0;
    char* second = text;
    strtoll(text, &second, 10);
    const int64_t before = total;
    total = strtoll(second, nullptr, 10);
    return total - before;
  }

 private:
  int file = -1;
  int64_t total = 0;
};

class Crowd {
 public:
  // Of `threads`, how many should share the next operation.
  int team(int threads, int64_t at) {
    if (fewer > 0 && at >= retry) {
      --fewer;
      tried = at, retry = at + pause, fresh = true;
    }
    if (fewer >= threads) fewer = threads - 1;
    return threads - fewer;
  }

  // When to look at the team's delays again. A trial of one more thread is a short one.
  bool due(int64_t at) const { return fresh || at - looked > (at - tried < TRIAL ? LOOK / 2 : LOOK); }

  // `longest`, `sum`: of the delays of a team since it was last looked at.
  void delayed(int64_t longest, int64_t sum, int team, int64_t at) {
    const int64_t span = at - looked;
    looked = at;
    if (fresh) {  // what was before counts for nothing
      fresh = false;
      return;
    }
    // Worth it where the time lost exceeds what one thread less costs: a little less than 1 / team of the time.
    const int64_t bearable = 3 * span / (4 * team) > span / 20 ? 3 * span / (4 * team) : span / 20;
    if (longest < bearable) {
      if (at - tried > TRIAL && at - tried < 2 * TRIAL) pause = pause / 2 > SHORTEST ? pause / 2 : SHORTEST;
      return;
    }
    if (at - tried < TRIAL) pause = 2 * pause < LONGEST ? 2 * pause : LONGEST;
    const int64_t missing = (sum + span / 2) / span;  // cores
    fewer += missing > 1 ? static_cast<int>(missing) : 1;
    retry = at + pause;
  }

 private:
  // Long enough that a neighbour that works in bursts (whoever sends a step's tokens on to many clients) is seen at its
  // share, and not at what it takes while it works.
  static constexpr int64_t LOOK = 64 * MS, TRIAL = 40 * MS, SHORTEST = 50 * MS, LONGEST = 400 * MS;
  int fewer = 0;
  bool fresh = true;
  int64_t looked = 0;
  int64_t tried = -2 * TRIAL, retry = 0;  // when one more was tried, and when it will be
  int64_t pause = SHORTEST;
};

}  // namespace llmx_pool
