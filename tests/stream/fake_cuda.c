/* Stands in for the CUDA driver and keeps the arguments of the last call. */
#include <stdlib.h>
#include <string.h>

struct launch {
  void *function, *stream;
  unsigned grid[3], block[3], shared;
  int has_extra;
  unsigned long long values[32];
};

struct launch last;
int sizes[32];  /* bytes to read of each parameter; 0: the end */
int result;

/* Letters of the calls that queue or ask for something, and the one of them that fails, from 0. */
char calls[256];
int called, failing = -1;

static int call(char letter) {
  if (called < (int)sizeof(calls) - 1) calls[called] = letter;
  return called++ == failing ? 700 : result;
}

extern void *context, *launched_in;

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
  launched_in = context;
  last = (struct launch){function, stream, {gx, gy, gz}, {bx, by, bz}, shared, extra != 0, {0}};
  for (int i = 0; i < 32 && sizes[i]; ++i) memcpy(&last.values[i], parameters[i], sizes[i]);
  return call('L');
}

void *context = (void *)0x77; /* current in "this thread" */
void *launched_in;
int pushes;

int capture_status; /* of every stream */
unsigned long long asked;

int cuStreamIsCapturing(void *stream, int *status) {
  launched_in = context;
  asked = (unsigned long long)stream;
  *status = capture_status;
  return result;
}

struct wait {
  void *stream;
  unsigned long long address;
  unsigned value, flags;
};

struct wait waited; /* before the last launch */

int cuStreamWaitValue32_v2(void *stream, unsigned long long address, unsigned value,
                           unsigned flags) {
  launched_in = context;
  waited = (struct wait){stream, address, value, flags};
  return result;
}

struct copy {
  unsigned long long to, from, bytes, stream;
};

struct copy copied[4]; /* the last ones */
int copies;
int copying; /* whether copies are made, and not only noted */

static int copy(char letter, unsigned long long to, unsigned long long from, size_t bytes,
                void *stream) {
  int failed = call(letter);
  launched_in = context;
  if (failed) return failed;
  copied[copies++ % 4] = (struct copy){to, from, bytes, (unsigned long long)stream};
  if (copying) memcpy((void *)to, (const void *)from, bytes);
  return 0;
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *stream) {
  return copy('C', to, (unsigned long long)from, bytes, stream);
}

int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *stream) {
  return copy('B', (unsigned long long)to, from, bytes, stream);
}

int cuStreamSynchronize(void *stream) {
  launched_in = context;
  return call('S');
}

/* Events have the number of their last record, and have occurred up to the number `reached`. */
int events, flags_of_events; /* that exist; of the last one */
unsigned long long recorded, reached = ~0ull, recorded_on;

int cuEventCreate(void **event, unsigned flags) {
  int failed = call('E');
  if (failed) return failed;
  *event = calloc(1, sizeof(recorded));
  flags_of_events = flags;
  ++events;
  return 0;
}

int cuEventRecord(void *event, void *stream) {
  int failed = call('R');
  launched_in = context;
  if (failed) return failed;
  *(unsigned long long *)event = ++recorded;
  recorded_on = (unsigned long long)stream;
  return 0;
}

int cuEventQuery(void *event) {
  int failed = call('Q');
  launched_in = context;
  if (failed) return failed;
  return *(unsigned long long *)event <= reached ? 0 : 600;
}

int cuEventDestroy_v2(void *event) {
  free(event);
  --events;
  return call('D');
}

int cuCtxGetCurrent(void **found) {
  *found = context;
  return 0;
}

int cuCtxPushCurrent_v2(void *given) {
  context = given;
  ++pushes;
  return 0;
}

int cuCtxPopCurrent_v2(void **given) {
  *given = context;
  context = (void *)0x99;
  --pushes;
  return 0;
}

int cuGetErrorName(int code, const char **text) {
  if (code == 999) return 1; /* leaves the text unchanged, as the driver does for unknown codes */
  *text = "CUDA_ERROR_FAKE";
  return 0;
}

int cuGetErrorString(int code, const char **text) {
  if (code == 999) return 1;
  *text = "something was made up";
  return 0;
}
