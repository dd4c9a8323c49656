package switchyard.client;

import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Flow;
import java.util.function.Consumer;
import java.util.function.Function;

/** Calls that end early by their future, an interrupt, the client or the subscriber; threads that share a client. */
final class Lives {
    private static final int THREADS = 16;

    private final Function<String, String> url;

    /** {@code url} returns the region of a script. */
    Lives(Function<String, String> url) {
        this.url = url;
    }

    Map<String, Object> all() throws InterruptedException {
        var found = new LinkedHashMap<String, Object>();
        found.put("cancelled", cancelled());
        found.put("interrupted", interrupted());
        found.put("closed", closed());
        found.put("polling", polling());
        found.put("shared", shared());
        found.put("demand", demand());
        return found;
    }

    private Switchyard client(String script) {
        return Switchyard.of(url.apply(script)).build();
    }

    private static String kind(Runnable work) {
        try {
            work.run();
            return "nothing";
        } catch (IllegalStateException error) {
            return error.getClass().getSimpleName();
        }
    }

    /** A request has to arrive before it can be ended: its first event or state shows that. */
    private Object cancelled() {
        try (var client = client("cancelled")) {
            var answer = client.async().chat(Chat.of("m", "hi"), CallOptions.NONE);
            answer.cancel(true);
            try (var events = client.streamChat(Chat.of("m", "hi"))) {
                events.next();
            }
            return kind(answer::join);
        }
    }

    private Object interrupted() throws InterruptedException {
        try (var client = client("interrupted"); var events = client.streamChat(Chat.of("m", "hi"))) {
            events.next();
            var found = new ArrayList<Object>();
            var waiting = new Thread(() -> {
                found.add(kind(events::hasNext));
                found.add(Thread.currentThread().isInterrupted());
            });
            waiting.start();
            waiting.interrupt();
            waiting.join();
            return found;
        }
    }

    private Object closed() {
        var client = client("closed");
        var events = client.streamChat(Chat.of("m", "hi"));
        events.next();
        client.close();
        return List.of(kind(events::hasNext), kind(() -> client.chat(Chat.of("m", "hi"))));
    }

    private Object polling() {
        var client = client("polling");
        var waiting = client.async().waitFor("ar_1", Duration.ofMinutes(1), Duration.ofSeconds(30));
        client.retrieve("ar_1");
        client.close();
        return kind(waiting::join);
    }

    private Object shared() throws InterruptedException {
        var texts = new ArrayList<String>();
        try (var client = client("shared")) {
            var threads = new ArrayList<Thread>();
            for (int index = 0; index < THREADS; index++) {
                var thread = new Thread(() -> {
                    var text = client.chat(Chat.of("m", "hi")).text();
                    synchronized (texts) {
                        texts.add(text);
                    }
                });
                threads.add(thread);
                thread.start();
            }
            for (var thread : threads) {
                thread.join();
            }
        }
        return texts;
    }

    /** A subscriber gets as many events as it requests, and a second one none. */
    private Object demand() throws InterruptedException {
        var texts = new ArrayList<Object>();
        var two = new CompletableFuture<Void>();
        try (var client = client("demand")) {
            var events = client.async().streamChat(Chat.of("m", "hi"), CallOptions.NONE).join();
            events.subscribe(new Subscriber(subscription -> subscription.request(2), event -> {
                texts.add(event.text());
                if (texts.size() == 2) {
                    two.complete(null);
                }
            }));
            two.get();
            events.subscribe(new Subscriber(subscription -> subscription.request(1), event -> texts.add("a third")));
            events.close();
            return texts;
        } catch (ExecutionException error) {
            return error.toString();
        }
    }

    private record Subscriber(Consumer<Flow.Subscription> opened, Consumer<Event> taken)
            implements Flow.Subscriber<Event> {
        @Override
        public void onSubscribe(Flow.Subscription subscription) {
            opened.accept(subscription);
        }

        @Override
        public void onNext(Event event) {
            taken.accept(event);
        }

        @Override
        public void onError(Throwable error) {}

        @Override
        public void onComplete() {}
    }
}
