package switchyard.client;

import java.io.IOException;
import java.net.URI;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.OptionalDouble;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.Flow;
import java.util.concurrent.Future;
import java.util.regex.Pattern;

/** One call and its attempts, which share one request id. {@code result} is what its caller waits for. */
final class Call<T> {
    /** Starts to read a good answer. */
    interface Opener<T> {
        Reading open(Call<T> call, HttpResponse<Flow.Publisher<List<ByteBuffer>>> response);
    }

    private static final Pattern VERSIONED = Pattern.compile("/v[0-9]+/.*", Pattern.DOTALL);
    /** Paths that ingresses serve next to {@code /v1}, not below it. */
    private static final Set<String> UNVERSIONED = Set.of(
            "/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/health", "/healthz",
            "/version");

    final AsyncSwitchyard client;
    final CompletableFuture<T> result = new CompletableFuture<>();
    private final String method;
    private final String path;
    private final String content;
    private final Map<String, String> headers = new TreeMap<>();
    private final Duration deadline;
    private final long startedAt = System.nanoTime();
    private final boolean resumes;
    private Opener<T> opener;

    private int answeredBy;
    private final List<Integer> tried = new ArrayList<>();
    private final Map<String, String> failures = new LinkedHashMap<>();
    private boolean isOver;
    private Race race;
    private Reading reading;
    private Reading broken;
    private Future<?> limit = CompletableFuture.completedFuture(null);
    private Future<?> pause = limit;

    Call(
            AsyncSwitchyard client, String method, String path, String content, CallOptions options, Opener<T> opener) {
        this.client = client;
        this.method = method;
        this.path = path.startsWith("/") ? path : "/" + path;
        this.content = content;
        this.opener = opener;
        deadline = options.deadline();
        resumes = options.resumes();
        if (client.options.apiKey != null && !client.options.apiKey.isEmpty()) {
            headers.put("authorization", "Bearer " + client.options.apiKey);
        }
        if (client.options.servingClass != null) {
            headers.put("x-switchyard-class", client.options.servingClass);
        }
        headers.put("x-request-id", AsyncSwitchyard.hex());
        options.headers().forEach((name, value) -> headers.put(name.toLowerCase(Locale.ROOT), value));
        if (content != null) {
            headers.put("content-type", "application/json");
        }
    }

    CompletableFuture<T> start() {
        client.open.add(this);
        result.whenComplete((value, error) -> {
            if (error != null) {
                abort(error);
            }
        });
        if (client.isClosed) {
            abort(new IllegalStateException("the client is closed"));
            return result;
        }
        if (deadline != null) {
            limit = client.after(deadline, () -> abort(new DeadlineExceededException(
                    path + " was not answered within " + AsyncSwitchyard.seconds(deadline) + " s", null)), result);
        }
        attempt(new Failover.Attempt(client.failover.order(now()).get(0), 0));
        return result;
    }

    synchronized int attempts() {
        return tried.size();
    }

    /** The answer has been read. */
    void finish() {
        synchronized (this) {
            isOver = true;
        }
        limit.cancel(false);
        client.open.remove(this);
    }

    /** Whether its answer is requested again if it breaks off. */
    boolean resumes() {
        return resumes;
    }

    /**
     * Sends the call again, because its answer broke off: {@code next} reads the repeat. Returns false if all attempts
     * are used, or the call has ended. If it fails before the repeat is read, {@code from} is told.
     */
    boolean repeat(Reading from, Opener<T> next) {
        synchronized (this) {
            if (isOver || !resumes) {
                return false;
            }
            client.failover.failed(answeredBy, now());
            if (client.failover.afterSilence(List.copyOf(tried), now()) == null) {
                return false;
            }
            opener = next;
            broken = from;
        }
        attempt(new Failover.Attempt(client.failover.order(now()).get(0), 0));
        return true;
    }

    /** Fails the call: its attempts are stopped, or the reading of its answer. */
    void abort(Throwable error) {
        Race racing;
        Reading read;
        Reading last;
        synchronized (this) {
            if (isOver) {
                return;
            }
            isOver = true;
            racing = race;
            read = reading;
            last = broken;
            pause.cancel(false);
        }
        limit.cancel(false);
        client.open.remove(this);
        if (racing != null) {
            racing.cancel();
        }
        if (read != null) {
            read.stop(error);
        }
        if (last != null) {
            last.stopped(error);
        }
        result.completeExceptionally(error);
    }

    private void attempt(Failover.Attempt next) {
        if (next.waitS() > 0) {
            var waits = Duration.ofNanos((long) (next.waitS() * 1e9));
            var waiting = client.after(waits, () -> race(next.region()), result);
            synchronized (this) {
                pause = waiting;
                if (isOver) {
                    waiting.cancel(false);
                }
            }
        } else {
            race(next.region());
        }
    }

    private void race(int region) {
        var started = new Race();
        synchronized (this) {
            if (isOver) {
                return;
            }
            race = started;
        }
        started.run(region);
    }

    /** Decides what follows an attempt: the answer is read, or another attempt made, or the call fails. */
    private void decide(Outcome outcome) {
        List<Integer> before;
        synchronized (this) {
            before = List.copyOf(tried);
        }
        if (outcome.response == null) {
            if (outcome.error instanceof IOException) {
                SwitchyardException failure;
                synchronized (this) {
                    var each = failures.entrySet().stream().map(one -> one.getKey() + ": " + one.getValue()).toList();
                    failure = new NoAnswerException(String.join("; ", each), outcome.error);
                }
                retry(client.failover.afterSilence(before, now()), failure);
            } else {
                abort(outcome.error);
            }
        } else if (outcome.isGood()) {
            Opener<T> opening;
            synchronized (this) {
                answeredBy = outcome.region;
                opening = opener;
            }
            read(outcome.response, opening.open(this, outcome.response));
        } else {
            read(outcome.response, new Reading.Refusal(this, outcome.response, refused -> {
                var after = refused.retryAfter().map(time -> OptionalDouble.of(time.toNanos() / 1e9))
                        .orElse(OptionalDouble.empty());
                retry(client.failover.afterRefusal(before, outcome.region, refused.status(), after, now()), refused);
            }));
        }
    }

    private void retry(Failover.Attempt next, SwitchyardException failure) {
        if (next == null) {
            abort(failure);
        } else {
            attempt(next);
        }
    }

    private void read(HttpResponse<Flow.Publisher<List<ByteBuffer>>> response, Reading next) {
        synchronized (this) {
            if (!isOver) {
                reading = next;
            }
        }
        if (reading == next) {
            next.begin();
        } else {
            Reading.discard(response);
        }
    }

    private CompletableFuture<HttpResponse<Flow.Publisher<List<ByteBuffer>>>> send(int region) {
        var request = HttpRequest.newBuilder(URI.create(url(client.options.regions.get(region), path)))
                .timeout(client.options.silence)
                .method(method, content == null
                        ? HttpRequest.BodyPublishers.noBody() : HttpRequest.BodyPublishers.ofString(content));
        headers.forEach(request::setHeader);
        if (deadline != null) {
            long left = Math.round((deadline.toNanos() - (System.nanoTime() - startedAt)) / 1e6);
            request.setHeader("x-switchyard-deadline-ms", String.valueOf(Math.max(1, left)));
        }
        client.options.trace.get().forEach(request::setHeader);
        synchronized (this) {
            tried.add(region);
        }
        return client.http.sendAsync(request.build(), HttpResponse.BodyHandlers.ofPublisher());
    }

    private record Outcome(int region, HttpResponse<Flow.Publisher<List<ByteBuffer>>> response, Throwable error) {
        boolean isGood() {
            return response != null && response.statusCode() / 100 == 2;
        }

        void discard() {
            if (response != null) {
                Reading.discard(response);
            }
        }
    }

    /** One attempt, or two of them if the first is slow and hedging is on: the first good answer wins. */
    private final class Race {
        private final List<CompletableFuture<?>> sent = new ArrayList<>();
        private Future<?> hedge = CompletableFuture.completedFuture(null);
        private Outcome worse;
        private int running;
        private boolean isDecided;

        void run(int region) {
            launch(region);
            var others = client.failover.order(now()).stream().filter(each -> !isTried(each)).toList();
            if (client.options.hedgeAfter != null && !others.isEmpty() && method.equals("POST")) {
                synchronized (this) {
                    hedge = isDecided ? hedge
                            : client.after(client.options.hedgeAfter, () -> launch(others.get(0)), result);
                }
            }
        }

        void cancel() {
            List<CompletableFuture<?>> losing;
            Outcome unread;
            synchronized (this) {
                isDecided = true;
                losing = List.copyOf(sent);
                unread = worse;
                worse = null;
                hedge.cancel(false);
            }
            losing.forEach(each -> each.cancel(true));
            if (unread != null) {
                unread.discard();
            }
        }

        private void launch(int region) {
            CompletableFuture<HttpResponse<Flow.Publisher<List<ByteBuffer>>>> sending;
            synchronized (this) {
                if (isDecided) {
                    return;
                }
                running++;
                try {
                    sending = send(region);
                } catch (RuntimeException error) {
                    sending = CompletableFuture.failedFuture(error);
                }
                sent.add(sending);
            }
            sending.whenComplete((response, error) -> done(new Outcome(region, response, cause(error))));
        }

        private void done(Outcome outcome) {
            note(outcome);
            var chosen = outcome;
            synchronized (this) {
                running--;
                if (isDecided) {
                    outcome.discard();
                    return;
                }
                if (!outcome.isGood() && running > 0) {
                    worse = outcome;
                    return;
                }
                isDecided = true;
                if (!outcome.isGood() && worse != null && worse.response != null && outcome.response == null) {
                    chosen = worse;
                    worse = null;
                }
            }
            cancel();
            decide(chosen);
        }

        private void note(Outcome outcome) {
            if (outcome.error instanceof IOException) {
                synchronized (Call.this) {
                    failures.put(client.options.regions.get(outcome.region), told(outcome.error));
                }
                client.failover.failed(outcome.region, now());
            } else if (outcome.response != null && outcome.response.statusCode() < 500) {
                client.failover.answered(outcome.region);
            }
        }
    }

    private synchronized boolean isTried(int region) {
        return tried.contains(region);
    }

    private static double now() {
        return System.nanoTime() / 1e9;
    }

    /** Returns the URL of a path: below the base URL of a region, unless it has a version or needs none. */
    static String url(String region, String path) {
        var origin = region.endsWith("/v1") ? region.substring(0, region.length() - 3) : region;
        var bare = path.split("\\?", 2)[0];
        return (VERSIONED.matcher(path).matches() || UNVERSIONED.contains(bare) ? origin : region) + path;
    }

    static Map<String, String> headersOf(HttpResponse<?> response) {
        var found = new TreeMap<String, String>();
        response.headers().map().forEach((name, values) ->
                found.put(name.toLowerCase(Locale.ROOT), String.join(", ", values)));
        return found;
    }

    /** Returns an error as text; some of the JDK's have none, and their cause has. */
    static String told(Throwable error) {
        var inner = error.getCause();
        return inner == null || inner == error ? error.toString() : error + " (" + inner + ")";
    }

    private static Throwable cause(Throwable error) {
        return error instanceof CompletionException && error.getCause() != null ? error.getCause() : error;
    }
}
