/* Both ends of the traffic bench at the price of their system calls, so that what lies between is what is measured.

   wire serve PORT CELLS            cells that answer at once, on PORT, PORT+1, …
   wire closed PORT CONNS S BODY    as many requests as go through CONNS connections in S seconds
   wire rate PORT RATE S BODY       RATE requests a second at random (Poisson) moments, whatever became of the earlier ones

   A cell answers {"stream": true, "max_tokens": N, "seed": U} with N events, U microseconds apart, and everything else
   with one short JSON. The two clients print one JSON object. Times to first token count from the moment at which a
   request should have been sent, so a client that is held up hides nothing. One thread, IPv4 loopback, no TLS. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 65536, MAX_FD = 20000, EVENTS = 512, MAX_SAMPLES = 1 << 20 };
enum Kind { NONE, LISTENER, CELL, CLIENT, TIMER };

typedef struct {
    enum Kind kind;
    unsigned turn;      /* grows with every request, so that a late timer finds out that it is late */
    int used;           /* bytes of a request so far (cell), or 1 while a request is under way (client) */
    int left, interval_us;
    long long asked_ns; /* client: when the request should have been sent */
    int status, head_done, chunked, first_seen, matched, tail;
    long body_left;
    char *text;
} Conn;

static Conn conns[MAX_FD];
static int poll_fd, timer_fd;

static long long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what) { perror(what); exit(1); }

static void watch(int fd, enum Kind kind) {
    if (fd >= MAX_FD) { fprintf(stderr, "more than %d files\n", MAX_FD); exit(1); }
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    char *text = conns[fd].text;
    unsigned turn = conns[fd].turn + 1;
    conns[fd] = (Conn){.kind = kind, .text = text, .turn = turn};
    if (epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &e)) die("epoll_ctl");
}

static void drop(int fd) { conns[fd].kind = NONE; conns[fd].turn++; close(fd); }

static void wake_at(long long at_ns) {
    if (at_ns <= 0) at_ns = 1;
    struct itimerspec t = {.it_value = {at_ns / 1000000000LL, at_ns % 1000000000LL}};
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &t, NULL);
}

static struct sockaddr_in loopback(int port) {
    return (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static void no_delay(int fd) { int one = 1; setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); }

static void send_all(int fd, const char *text, size_t length) {
    /* A reader that does not read is the bench's own limit: it is dropped and counts as an error there. */
    if (send(fd, text, length, MSG_NOSIGNAL) != (ssize_t)length) drop(fd);
}

/* --- cells --- */

typedef struct { long long due_ns; int fd; unsigned turn; } Due;
static Due *heap;
static int heap_used, heap_size;

static void heap_push(Due due) {
    if (heap_used == heap_size && !(heap = realloc(heap, (heap_size = heap_size * 2 + 64) * sizeof *heap))) die("realloc");
    int i = heap_used++;
    for (; i && heap[(i - 1) / 2].due_ns > due.due_ns; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = due;
}

static Due heap_pop(void) {
    Due top = heap[0], last = heap[--heap_used];
    int i = 0;
    for (int child; (child = 2 * i + 1) < heap_used; i = child) {
        if (child + 1 < heap_used && heap[child + 1].due_ns < heap[child].due_ns) child++;
        if (heap[child].due_ns >= last.due_ns) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return top;
}

static const char WHOLE[] =
    "{\"id\":\"c\",\"object\":\"chat.completion\",\"created\":0,\"model\":\"tiny\",\"choices\":[{\"index\":0,\"message\":"
    "{\"role\":\"assistant\",\"content\":\"token\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":9,"
    "\"completion_tokens\":1,\"total_tokens\":10},\"status\":\"ok\",\"data\":[{\"id\":\"tiny\",\"object\":\"model\"}]}\n";
static const char EVENT[] =
    "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":0,\"model\":\"tiny\",\"choices\":[{\"index\":0,"
    "\"delta\":{\"role\":\"assistant\",\"content\":\" token\"},\"finish_reason\":%s}]}\n\n%s";
static char whole[2048], event[1024], last_event[1024];
static int whole_length, event_length, last_length;
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

static void prepare_answers(void) {
    char text[512];
    whole_length = sprintf(whole, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                           sizeof WHOLE - 1, WHOLE);
    event_length = sprintf(event, "%x\r\n%s\r\n", sprintf(text, EVENT, "null", ""), text);
    last_length = sprintf(last_event, "%x\r\n%s\r\n0\r\n\r\n", sprintf(text, EVENT, "\"stop\"", "data: [DONE]\n\n"), text);
}

static void send_event(int fd, int with_head) {
    Conn *c = &conns[fd];
    char text[2048];
    int length = with_head ? sprintf(text, "%s", STREAM_HEAD) : 0;
    int is_last = --c->left <= 0;
    memcpy(text + length, is_last ? last_event : event, is_last ? last_length : event_length);
    send_all(fd, text, length + (is_last ? last_length : event_length));
    if (!is_last && c->kind == CELL) heap_push((Due){now_ns() + c->interval_us * 1000LL, fd, c->turn});
}

static long number_after(const char *text, const char *key, long otherwise) {
    const char *at = strstr(text, key);
    return at ? strtol(at + strlen(key) + strspn(at + strlen(key), "\": "), NULL, 10) : otherwise;
}

static void answer(int fd, const char *body) {
    Conn *c = &conns[fd];
    c->turn++;
    const char *stream = strstr(body, "\"stream\"");
    if (stream && !strncmp(stream + 8 + strspn(stream + 8, ": "), "true", 4)) {
        c->left = number_after(body, "\"max_tokens\"", 16);
        c->interval_us = number_after(body, "\"seed\"", 0);
        send_event(fd, 1);
    } else
        send_all(fd, whole, whole_length);
}

static void read_request(int fd) {
    Conn *c = &conns[fd];
    if (!c->text && !(c->text = malloc(BUFFER))) die("malloc");
    ssize_t got = recv(fd, c->text + c->used, BUFFER - 1 - c->used, 0);
    if (got <= 0) { drop(fd); return; }
    c->used += got;
    c->text[c->used] = 0;
    char *end = strstr(c->text, "\r\n\r\n");
    if (!end) return;
    char *length = strcasestr(c->text, "content-length:");
    long wanted = length && length < end ? strtol(length + 15, NULL, 10) : 0;
    int chunked = (length = strcasestr(c->text, "transfer-encoding: chunked")) && length < end;
    int whole_body = chunked ? !strcmp(c->text + c->used - 5, "0\r\n\r\n") : c->used - (end + 4 - c->text) >= wanted;
    if (!whole_body) return;
    c->used = 0;
    answer(fd, end + 4);
}

static void listen_on(int port, enum Kind kind) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    struct sockaddr_in at = loopback(port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (void *)&at, sizeof at) || listen(fd, 4096)) die("listen");
    watch(fd, kind);
}

static void accept_all(int listener) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        no_delay(fd);
        watch(fd, CELL);
    }
}

static void serve(int port, int cells) {
    prepare_answers();
    for (int i = 0; i < cells; i++) listen_on(port + i, LISTENER);
    struct epoll_event ready[EVENTS];
    for (;;) {
        int count = epoll_wait(poll_fd, ready, EVENTS, -1);
        for (int i = 0; i < count; i++) {
            int fd = ready[i].data.fd;
            if (conns[fd].kind == CELL) read_request(fd);
            else if (conns[fd].kind == LISTENER) accept_all(fd);
            else if (conns[fd].kind == TIMER) { long long times; (void)!read(fd, &times, sizeof times); }
        }
        while (heap_used && heap[0].due_ns <= now_ns()) {
            Due due = heap_pop();
            if (conns[due.fd].turn == due.turn && conns[due.fd].kind == CELL) send_event(due.fd, 0);
        }
        if (heap_used) wake_at(heap[0].due_ns);
    }
}

/* --- clients --- */

static int port_asked, idle[MAX_FD], idle_count, open_count, is_closed_loop;
static char request[BUFFER];
static int request_length;
static long long ends_ns, done, errors, events_seen, bytes_seen;
static int first_us[MAX_SAMPLES], first_count;
static char complaint[200];

static void prepare_request(const char *body) {
    request_length = snprintf(request, sizeof request,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        "Authorization: Bearer %s\r\nContent-Length: %zu\r\n\r\n%s",
        getenv("WIRE_KEY") ? getenv("WIRE_KEY") : "none", strlen(body), body);
}

static int connected(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in to = loopback(port_asked);
    if (fd < 0 || connect(fd, (void *)&to, sizeof to)) { if (fd >= 0) close(fd); return -1; }
    fcntl(fd, F_SETFL, O_NONBLOCK);
    no_delay(fd);
    watch(fd, CLIENT);
    open_count++;
    return fd;
}

static void ask(int fd, long long asked_ns) {
    Conn *c = &conns[fd];
    *c = (Conn){.kind = CLIENT, .used = 1, .asked_ns = asked_ns, .text = c->text, .turn = c->turn};
    if (send(fd, request, request_length, MSG_NOSIGNAL) != request_length) { errors++; open_count--; drop(fd); }
}

static void complain(int status, const char *text) {
    errors++;
    if (complaint[0]) return;
    int used = snprintf(complaint, sizeof complaint, "status %d: %.120s", status, text);
    for (int i = 0; i < used && complaint[i]; i++)
        if (complaint[i] < ' ' || complaint[i] == '"' || complaint[i] == '\\') complaint[i] = ' ';
}

static void finish(int fd) {
    conns[fd].used = 0;
    done++;
    if (!is_closed_loop) idle[idle_count++] = fd;
    else if (now_ns() < ends_ns) ask(fd, now_ns());
}

/* Returns the rest of the text behind the head, or NULL while the head is not whole. */
static char *read_head(Conn *c, char *text) {
    char *end = strstr(text, "\r\n\r\n"), *at;
    if (!end) return NULL;
    c->head_done = 1;
    c->status = atoi(text + 9);
    c->chunked = (at = strcasestr(text, "transfer-encoding: chunked")) && at < end;
    c->body_left = (at = strcasestr(text, "content-length:")) && at < end ? strtol(at + 15, NULL, 10) : 0;
    if (c->status != 200) complain(c->status, end + 4);
    return end + 4;
}

static void read_body(Conn *c, const char *text, int length) {
    static const char MARK[] = "data: {", END[] = "\r\n0\r\n\r\n";
    for (int i = 0; i < length; i++) {
        c->matched = text[i] == MARK[c->matched] ? c->matched + 1 : text[i] == MARK[0];
        if (c->matched == sizeof MARK - 1) {
            events_seen++;
            c->matched = 0;
            if (!c->first_seen && first_count < MAX_SAMPLES) first_us[first_count++] = (now_ns() - c->asked_ns) / 1000;
            c->first_seen = 1;
        }
        c->tail = text[i] == END[c->tail] ? c->tail + 1 : text[i] == '\r' ? (c->tail == 6 ? 0 : 1) : 0;
        if (c->tail == 7) break;
    }
    c->body_left -= length;
}

static void read_answer(int fd) {
    static char text[BUFFER];
    Conn *c = &conns[fd];
    ssize_t got = recv(fd, text, BUFFER - 1, 0);
    if (got <= 0) {
        if (got < 0 && errno == EAGAIN) return;
        if (c->used) complain(0, "the connection was closed");
        for (int i = 0; i < idle_count; i++)
            if (idle[i] == fd) { idle[i] = idle[--idle_count]; break; }
        open_count--;
        drop(fd);
        if (is_closed_loop && now_ns() < ends_ns && (fd = connected()) >= 0) ask(fd, now_ns());
        return;
    }
    text[got] = 0;
    bytes_seen += got;
    char *body = text;
    if (!c->head_done && !(body = read_head(c, text))) { complain(0, "a head in pieces"); return; }
    read_body(c, body, got - (body - text));
    if (c->chunked ? c->tail == 7 : c->body_left <= 0) finish(fd);
}

static double uniform(void) {
    static unsigned long long x = 88172645463325252ULL;
    x ^= x << 13; x ^= x >> 7; x ^= x << 17;
    return ((x >> 11) + 0.5) / 9007199254740992.0;
}

static void print_result(double took_s) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    printf("{\"requests\":%lld,\"seconds\":%.4f,\"errors\":%lld,\"events\":%lld,\"bytes\":%lld,\"connections\":%d,"
           "\"cpu_s\":%.3f,\"complaint\":\"%s\",\"first_us\":[", done, took_s, errors, events_seen, bytes_seen, open_count,
           used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6, complaint);
    for (int i = 0; i < first_count; i++) printf(i ? ",%d" : "%d", first_us[i]);
    printf("]}\n");
}

static void poll_once(int timeout_ms) {
    struct epoll_event ready[EVENTS];
    int count = epoll_wait(poll_fd, ready, EVENTS, timeout_ms);
    for (int i = 0; i < count; i++) {
        int fd = ready[i].data.fd;
        if (conns[fd].kind == CLIENT) read_answer(fd);
        else if (conns[fd].kind == TIMER) { long long times; (void)!read(fd, &times, sizeof times); }
    }
}

static int busy(void) {
    int count = 0;
    for (int fd = 0; fd < MAX_FD; fd++) count += conns[fd].kind == CLIENT && conns[fd].used;
    return count;
}

/* What is cut in the middle cannot be kept behind a proxy either: without this every round would begin with as many new
   connections there as it has requests at once. What is answered here counts in no figure but errors. */
static void let_end(void) {
    long long patience = now_ns() + 5000000000LL;
    while (busy() && now_ns() < patience) poll_once(50);
    if (busy()) complain(0, "no answer 5 s after the end");
}

static void closed_loop(int connections, double seconds) {
    is_closed_loop = 1;
    int fds[MAX_FD], count = 0;
    for (int i = 0; i < connections; i++)
        if ((fds[count] = connected()) >= 0) count++;
    long long began = now_ns();
    ends_ns = began + seconds * 1e9;
    for (int i = 0; i < count; i++) ask(fds[i], now_ns());
    if (!count) complain(0, "no connection");
    while (now_ns() < ends_ns && open_count) poll_once(100);
    double took_s = (now_ns() - began) / 1e9;
    long long done_in_time = done, events_in_time = events_seen, bytes_in_time = bytes_seen;
    let_end();
    done = done_in_time, events_seen = events_in_time, bytes_seen = bytes_in_time;
    print_result(took_s);
}

static void open_loop(double rate, double seconds) {
    long long began = now_ns(), due = began;
    ends_ns = began + seconds * 1e9;
    while (due < ends_ns) {
        for (; due <= now_ns() && due < ends_ns; due += -log(uniform()) / rate * 1e9) {
            int fd = idle_count ? idle[--idle_count] : connected();
            if (fd < 0) complain(0, "no connection");
            else ask(fd, due);
        }
        wake_at(due);
        poll_once(1000);
    }
    long long patience = now_ns() + 5000000000LL; /* for the last answers */
    while (done + errors < 1 << 30 && open_count > idle_count && now_ns() < patience) poll_once(50);
    if (open_count > idle_count) { errors += open_count - idle_count; complain(0, "no answer 5 s after the end"); }
    print_result((ends_ns - began) / 1e9);
}

int main(int argc, char **argv) {
    poll_fd = epoll_create1(0);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    watch(timer_fd, TIMER);
    if (argc == 4 && !strcmp(argv[1], "serve")) serve(atoi(argv[2]), atoi(argv[3]));
    if (argc != 6) { fprintf(stderr, "usage: wire serve PORT CELLS | wire closed|rate PORT COUNT SECONDS BODY\n"); return 2; }
    port_asked = atoi(argv[2]);
    prepare_request(argv[5]);
    if (!strcmp(argv[1], "closed")) closed_loop(atoi(argv[3]), atof(argv[4]));
    else open_loop(atof(argv[3]), atof(argv[4]));
    return 0;
}
