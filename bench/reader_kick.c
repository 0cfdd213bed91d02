/* The other way to wait for a lookup, for comparison only (tests/gpu): the host function
 * hands its job to a thread and returns, and a kernel spins on `flag` until the thread has
 * set it. Other host functions are then never held up, but a multiprocessor waits.
 *
 *   gcc -O2 -fPIC -shared -pthread -o libkick.so bench/reader_kick.c
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

typedef void (*host_function)(void *);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static void *job;
static host_function lookup;
static _Atomic int *flag;

static void *run(void *unused) {
  (void)unused;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!job)
      pthread_cond_wait(&work, &lock);
    void *mine = job;
    job = NULL;
    pthread_mutex_unlock(&lock);
    lookup(mine);
    atomic_store(flag, 1);
    pthread_mutex_lock(&lock);
  }
  return NULL;
}

void engram_kick_init(void *pinned_flag, host_function function) {
  pthread_t thread;
  flag = pinned_flag;
  lookup = function;
  pthread_create(&thread, NULL, run, NULL);
}

void engram_kick(void *arg) {
  pthread_mutex_lock(&lock);
  job = arg;
  pthread_mutex_unlock(&lock);
  pthread_cond_signal(&work);
}

void engram_nothing(void *arg) { (void)arg; }
