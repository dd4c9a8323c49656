package switchyard.client;

import java.net.URLEncoder;
import java.net.http.HttpClient;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.ThreadFactory;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/**
 * The client with futures. Each fails with the exceptions that {@link Switchyard} throws. {@code cancel} of a returned
 * future ends the request and closes its connection; that of a stage derived from it does not.
 */
public final class AsyncSwitchyard implements AutoCloseable {
    static final Duration FIRST_POLL = Duration.ofMillis(500);
    private static final Duration LONGEST_POLL = Duration.ofSeconds(10);
    private static final double GROWTH = 1.5;

    final ClientOptions options;
    final Failover failover;
    final HttpClient http;
    final Set<Call<?>> open = ConcurrentHashMap.newKeySet();
    volatile boolean isClosed;
    private final Set<CompletableFuture<?>> polls = ConcurrentHashMap.newKeySet();
    private final ScheduledThreadPoolExecutor timer;
    private final ExecutorService executor;

    AsyncSwitchyard(ClientOptions options) {
        this.options = options;
        failover = new Failover(options.regions.size(), options.retries);
        ThreadFactory daemons = work -> {
            var thread = new Thread(work, "switchyard-client");
            thread.setDaemon(true);
            return thread;
        };
        executor = Executors.newCachedThreadPool(daemons);
        timer = new ScheduledThreadPoolExecutor(1, daemons);
        timer.setRemoveOnCancelPolicy(true);
        http = options.http(executor);
    }

    /** As {@link Switchyard#post(String, Body, CallOptions)}. */
    public CompletableFuture<Answer> post(String path, Body body, CallOptions call) {
        return read("POST", path, body, call);
    }

    /** As {@link Switchyard#get(String, CallOptions)}. */
    public CompletableFuture<Answer> get(String path, CallOptions call) {
        return read("GET", path, null, call);
    }

    /** As {@link Switchyard#stream(String, Body, CallOptions)}, once the answer has begun. */
    public CompletableFuture<EventPublisher> stream(String path, Body body, CallOptions call) {
        var members = new LinkedHashMap<>(body.members());
        members.put("stream", true);
        return new Call<EventPublisher>(this, "POST", path, Json.write(members), call, EventPublisher::open).start();
    }

    public CompletableFuture<Answer> chat(Chat chat, CallOptions call) {
        return post("/chat/completions", chat, call);
    }

    public CompletableFuture<EventPublisher> streamChat(Chat chat, CallOptions call) {
        return stream("/chat/completions", chat, call);
    }

    public CompletableFuture<Answer> embeddings(Embeddings body, CallOptions call) {
        return post("/embeddings", body, call);
    }

    public CompletableFuture<List<Map<String, Object>>> models() {
        return linked(get("/models", CallOptions.NONE), answer ->
                Json.list(answer.json(), "data").stream().map(Json::object).toList());
    }

    public CompletableFuture<Pending> submit(String path, Body body, SubmitOptions submit) {
        var key = submit.idempotencyKey() == null ? hex() : submit.idempotencyKey();
        var call = CallOptions.NONE.header("idempotency-key", key);
        if (submit.deadline() != null) {
            call = call.header("x-switchyard-deadline-ms", String.valueOf(submit.deadline().toMillis()));
        }
        if (submit.callbackUrl() != null) {
            call = call.header("x-switchyard-callback-url", submit.callbackUrl());
        }
        if (submit.sink() != null) {
            call = call.header("x-switchyard-sink", submit.sink());
        }
        return linked(post("/async" + path.replaceFirst("^/v1(?=/)", ""), body, call), AsyncSwitchyard::pending);
    }

    public CompletableFuture<Pending> retrieve(String id) {
        return linked(get(pathOf(id), CallOptions.NONE), AsyncSwitchyard::pending);
    }

    public CompletableFuture<Pending> cancel(String id) {
        return linked(read("DELETE", pathOf(id), null, CallOptions.NONE), AsyncSwitchyard::pending);
    }

    /** Polls until the request has ended, with intervals that grow by half up to 10 s. */
    public CompletableFuture<Pending> waitFor(String id, Duration timeout, Duration poll) {
        var ended = new CompletableFuture<Pending>();
        polls.add(ended);
        ended.whenComplete((value, error) -> polls.remove(ended));
        poll(ended, id, System.nanoTime() + timeout.toNanos(), timeout, poll);
        return ended;
    }

    private void poll(CompletableFuture<Pending> ended, String id, long endsAt, Duration timeout, Duration pause) {
        var asked = retrieve(id);
        ended.whenComplete((value, error) -> asked.cancel(true));
        asked.whenComplete((found, error) -> {
            if (error != null) {
                ended.completeExceptionally(error);
            } else if (found.hasEnded()) {
                ended.complete(found);
            } else if (System.nanoTime() + pause.toNanos() - endsAt > 0) {
                ended.completeExceptionally(new DeadlineExceededException(
                        found.id() + " is " + found.status() + " after " + seconds(timeout) + " s", null));
            } else {
                long next = Math.min(LONGEST_POLL.toNanos(), (long) (pause.toNanos() * GROWTH));
                var waits = after(pause, () -> poll(ended, id, endsAt, timeout, Duration.ofNanos(next)), ended);
                ended.whenComplete((value, problem) -> waits.cancel(false));
            }
        });
    }

    /** Ends open calls and the client's threads. */
    @Override
    public void close() {
        isClosed = true;
        timer.shutdownNow();
        open.forEach(call -> call.abort(new CancellationException("the client was closed")));
        polls.forEach(each -> each.completeExceptionally(new CancellationException("the client was closed")));
        try {
            HttpClient.class.getMethod("shutdownNow").invoke(http);
        } catch (ReflectiveOperationException ignored) {
            // Before Java 21, idle connections are closed when nothing refers to the client.
        }
    }

    /** Runs work after a pause, on a thread where it may block. A closed client fails {@code waiting} instead. */
    Future<?> after(Duration pause, Runnable work, CompletableFuture<?> waiting) {
        try {
            return timer.schedule(() -> executor.execute(work), pause.toNanos(), TimeUnit.NANOSECONDS);
        } catch (RejectedExecutionException error) {
            waiting.completeExceptionally(new CancellationException("the client was closed"));
            return waiting;
        }
    }

    static String hex() {
        return UUID.randomUUID().toString().replace("-", "");
    }

    static String seconds(Duration time) {
        var text = String.format(Locale.ROOT, "%.3f", time.toNanos() / 1e9);
        return text.replaceAll("\\.?0+$", "");
    }

    private CompletableFuture<Answer> read(String method, String path, Body body, CallOptions call) {
        var content = body == null ? null : body.json();
        return new Call<Answer>(this, method, path, content, call, Reading.Whole::new).start();
    }

    private static Pending pending(Answer answer) {
        var found = Pending.of(answer.json());
        if (found.id().isEmpty() || found.status().isEmpty()) {
            throw new BrokenOffException("the answer has no id and status: " + answer.json(), null);
        }
        return found;
    }

    private static String pathOf(String id) {
        return "/async/" + URLEncoder.encode(id, StandardCharsets.UTF_8).replace("+", "%20");
    }

    /** Returns a future whose cancellation also ends the call below it. */
    private static <A, B> CompletableFuture<B> linked(CompletableFuture<A> call, Function<A, B> then) {
        var result = new CompletableFuture<B>();
        call.whenComplete((value, error) -> {
            if (error != null) {
                result.completeExceptionally(error);
                return;
            }
            try {
                result.complete(then.apply(value));
            } catch (RuntimeException problem) {
                result.completeExceptionally(problem);
            }
        });
        result.whenComplete((value, error) -> {
            if (result.isCancelled()) {
                call.cancel(true);
            }
        });
        return result;
    }
}
