package switchyard.client;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executors;
import java.util.concurrent.Flow;
import java.util.concurrent.Future;

/**
 * Runs the table of cases that the Python client runs as well (tests/client/cases.py), by the blocking client and by
 * futures. Reads a document from standard input and writes the results of each case; Python compares them.
 */
public final class Cases {
    private static final int AT_A_TIME = 8;

    private final Object document;

    private Cases(Object document) {
        this.document = document;
    }

    public static void main(String[] arguments) throws IOException, InterruptedException, ExecutionException {
        var cases = new Cases(Json.parse(System.in.readAllBytes()));
        var pool = Executors.newFixedThreadPool(AT_A_TIME);
        var running = new LinkedHashMap<String, Future<Object>>();
        for (var each : Json.list(cases.document, "cases")) {
            for (var mode : List.of("sync", "async")) {
                running.put(mode + "/" + Json.text(each, "name"), pool.submit(() -> cases.run(each, mode)));
            }
        }
        var results = new LinkedHashMap<String, Object>();
        for (var entry : running.entrySet()) {
            results.put(entry.getKey(), entry.getValue().get());
        }
        pool.shutdown();
        results.put("units", Units.all());
        results.put("lives", new Lives(script ->
                Json.text(cases.document, "urls", "east") + "/java-life-" + script + "/v1").all());
        results.put("snippets", cases.snippets());
        System.out.println(Json.write(results));
    }

    /** Runs code of the console, and returns what each program prints. */
    private List<Object> snippets() {
        var printed = new ArrayList<Object>();
        var screen = System.out;
        for (var name : Json.list(document, "snippets")) {
            var output = new ByteArrayOutputStream();
            System.setOut(new PrintStream(output, true, StandardCharsets.UTF_8));
            try {
                Class.forName((String) name).getMethod("main", String[].class).invoke(null, (Object) new String[0]);
                printed.add(output.toString(StandardCharsets.UTF_8));
            } catch (ReflectiveOperationException error) {
                printed.add(String.valueOf(error.getCause()));
            } finally {
                System.setOut(screen);
            }
        }
        return printed;
    }

    private Object run(Object each, String mode) {
        var results = new ArrayList<Object>();
        try (var client = options(each, mode).build()) {
            for (var call : Json.list(each, "calls")) {
                results.add(mode.equals("sync") ? asked(new Blocking(client), call) : asked(new Futures(client), call));
            }
        } catch (RuntimeException error) {
            results.add(Map.of("error", error.toString()));
        }
        return results;
    }

    private ClientOptions options(Object each, String mode) {
        var base = "/java-" + mode + "-" + Json.text(each, "name") + "/v1";
        var urls = Json.list(each, "order").stream()
                .map(region -> Json.text(document, "urls", region) + base)
                .toArray(String[]::new);
        var options = Switchyard.of(urls);
        Json.object(Json.at(each, "options")).forEach((name, value) -> {
            switch (name) {
                case "api_key" -> options.apiKey((String) value);
                case "serving_class" -> options.servingClass((String) value);
                case "hedge_after_s" -> options.hedgeAfter(seconds(value));
                case "silence_s" -> options.silence(seconds(value));
                case "ca_file" -> options.caFile(Path.of(Json.text(document, "ca_file")));
                case "trace" -> options.trace(() -> Map.of("traceparent", (String) value));
                case "retries" -> options.retries(new Retries((int) Json.number(value, "attempts"),
                        seconds(Json.at(value, "longest_wait_s")), seconds(Json.at(value, "rest_s"))));
                default -> throw new IllegalArgumentException(name);
            }
        });
        return options;
    }

    private static Duration seconds(Object value) {
        return Duration.ofNanos((long) (((Number) value).doubleValue() * 1e9));
    }

    private static Object asked(Client client, Object call) {
        var found = new LinkedHashMap<String, Object>();
        try {
            ask(client, call, found);
        } catch (ApiException error) {
            found.put("error", "ApiError");
            found.put("status", error.status());
            found.put("code", error.code().orElse(null));
            found.put("said", error.getMessage());
            found.put("request_id", error.requestId());
        } catch (SwitchyardException error) {
            found.put("error", error.getClass().getSimpleName().replace("Exception", ""));
        }
        return found;
    }

    private static void ask(Client client, Object call, Map<String, Object> found) {
        var path = Json.text(call, "path").isEmpty() ? "/chat/completions" : Json.text(call, "path");
        var given = Json.at(call, "body");
        var body = given instanceof Map<?, ?> ? Body.of(Json.object(given)) : Chat.of("m", "hi").maxTokens(5);
        var options = CallOptions.NONE;
        if (Json.at(call, "deadline_s") != null) {
            options = options.deadline(seconds(Json.at(call, "deadline_s")));
        }
        if (Boolean.TRUE.equals(Json.at(call, "resumes"))) {
            options = options.resuming();
        }
        if (Json.at(call, "headers") instanceof Map<?, ?> headers) {
            for (var header : headers.entrySet()) {
                options = options.header((String) header.getKey(), (String) header.getValue());
            }
        }
        switch (Json.text(call, "do")) {
            case "post" -> answer(client.post(path, body, options), found);
            case "get" -> answer(client.get(path), found);
            case "stream" -> {
                var texts = new ArrayList<String>();
                found.put("texts", texts);
                client.stream(path, body, options, (int) Json.number(call, "take"), texts);
            }
            case "models" -> found.put("models", client.models());
            case "embeddings" -> found.put("vectors",
                    client.embeddings(Embeddings.of("m", "one", "two").dimensions(2)).embeddings());
            case "submit" -> {
                var submit = SubmitOptions.NONE.deadline(Duration.ofSeconds(60)).callbackUrl("https://app/done").sink("s3");
                pending(client.submit(path, body, submit), found);
            }
            case "wait" -> pending(client.waitFor(Json.text(call, "id"), seconds(Json.at(call, "timeout_s"))), found);
            case "retrieve" -> pending(client.retrieve(Json.text(call, "id")), found);
            case "cancel" -> pending(client.cancel(Json.text(call, "id")), found);
            default -> throw new IllegalArgumentException(Json.text(call, "do"));
        }
    }

    private static void answer(Answer answer, Map<String, Object> found) {
        found.put("text", answer.text());
        found.put("attempts", answer.attempts());
        answer.usage().ifPresent(usage -> found.put("usage",
                List.of(usage.promptTokens(), usage.completionTokens(), usage.cachedTokens())));
        if (!answer.region().isEmpty()) {
            found.put("region", answer.region());
        }
        answer.budgets().forEach((kind, budget) -> found.put(kind,
                List.of(budget.limit(), budget.remaining(), budget.reset().toMillis() / 1000.0)));
    }

    private static void pending(Pending pending, Map<String, Object> found) {
        found.put("id", pending.id());
        found.put("status", pending.status());
        found.put("secret", pending.callbackSecret());
        found.put("text", pending.answer().map(Answer::text).orElse(null));
    }

    /** What both kinds of client do. */
    private interface Client {
        Answer post(String path, Body body, CallOptions options);

        Answer get(String path);

        /** Adds the texts of events; {@code take}: leave after so many, 0 for all. */
        void stream(String path, Body body, CallOptions options, int take, List<String> texts);

        List<Map<String, Object>> models();

        Answer embeddings(Embeddings body);

        Pending submit(String path, Body body, SubmitOptions options);

        Pending waitFor(String id, Duration timeout);

        Pending retrieve(String id);

        Pending cancel(String id);
    }

    private record Blocking(Switchyard client) implements Client {
        @Override
        public Answer post(String path, Body body, CallOptions options) {
            return client.post(path, body, options);
        }

        @Override
        public Answer get(String path) {
            return client.get(path);
        }

        @Override
        public void stream(String path, Body body, CallOptions options, int take, List<String> texts) {
            try (var events = client.stream(path, body, options)) {
                for (var event : events) {
                    texts.add(event.text());
                    if (texts.size() == take) {
                        return;
                    }
                }
            }
        }

        @Override
        public List<Map<String, Object>> models() {
            return client.models();
        }

        @Override
        public Answer embeddings(Embeddings body) {
            return client.embeddings(body);
        }

        @Override
        public Pending submit(String path, Body body, SubmitOptions options) {
            return client.submit(path, body, options);
        }

        @Override
        public Pending waitFor(String id, Duration timeout) {
            return client.waitFor(id, timeout);
        }

        @Override
        public Pending retrieve(String id) {
            return client.retrieve(id);
        }

        @Override
        public Pending cancel(String id) {
            return client.cancel(id);
        }
    }

    private record Futures(Switchyard owner) implements Client {
        private AsyncSwitchyard client() {
            return owner.async();
        }

        private static <V> V joined(CompletableFuture<V> future) {
            try {
                return future.get();
            } catch (ExecutionException error) {
                throw (RuntimeException) error.getCause();
            } catch (InterruptedException error) {
                throw new IllegalStateException(error);
            }
        }

        @Override
        public Answer post(String path, Body body, CallOptions options) {
            return joined(client().post(path, body, options));
        }

        @Override
        public Answer get(String path) {
            return joined(client().get(path, CallOptions.NONE));
        }

        @Override
        public void stream(String path, Body body, CallOptions options, int take, List<String> texts) {
            var over = new CompletableFuture<Void>();
            joined(client().stream(path, body, options)).subscribe(new Flow.Subscriber<>() {
                private Flow.Subscription subscription;

                @Override
                public void onSubscribe(Flow.Subscription given) {
                    subscription = given;
                    given.request(1);
                }

                @Override
                public void onNext(Event event) {
                    texts.add(event.text());
                    if (texts.size() == take) {
                        subscription.cancel();
                        over.complete(null);
                    } else {
                        subscription.request(1);
                    }
                }

                @Override
                public void onError(Throwable error) {
                    over.completeExceptionally(error);
                }

                @Override
                public void onComplete() {
                    over.complete(null);
                }
            });
            joined(over);
        }

        @Override
        public List<Map<String, Object>> models() {
            return joined(client().models());
        }

        @Override
        public Answer embeddings(Embeddings body) {
            return joined(client().embeddings(body, CallOptions.NONE));
        }

        @Override
        public Pending submit(String path, Body body, SubmitOptions options) {
            return joined(client().submit(path, body, options));
        }

        @Override
        public Pending waitFor(String id, Duration timeout) {
            return joined(client().waitFor(id, timeout, Duration.ofMillis(20)));
        }

        @Override
        public Pending retrieve(String id) {
            return joined(client().retrieve(id));
        }

        @Override
        public Pending cancel(String id) {
            return joined(client().cancel(id));
        }
    }
}
