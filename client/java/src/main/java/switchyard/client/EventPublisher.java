package switchyard.client;

import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.CancellationException;
import java.util.concurrent.Flow;

/**
 * The events of one stream, for one subscriber. Bytes are read only while the subscriber requests events. Cancelling or
 * closing it ends generation.
 */
public final class EventPublisher implements Flow.Publisher<Event>, AutoCloseable {
    private static final Set<String> LAST =
            Set.of("response.completed", "response.incomplete", "response.failed", "message_stop");

    private final Call<EventPublisher> call;
    private final Resumption resumption;
    private Events reading;
    private final ArrayDeque<Event> ready = new ArrayDeque<>();
    private Flow.Subscriber<? super Event> subscriber;
    private long demand;
    private boolean isReading;
    private boolean isDraining;
    private boolean isFinished;
    private boolean isSignalled;
    private Throwable failure;

    private EventPublisher(Call<EventPublisher> call, HttpResponse<Flow.Publisher<List<ByteBuffer>>> response) {
        this.call = call;
        resumption = call.resumes() ? new Resumption() : null;
        reading = new Events(response);
    }

    static Reading open(Call<EventPublisher> call, HttpResponse<Flow.Publisher<List<ByteBuffer>>> response) {
        return new EventPublisher(call, response).reading;
    }

    @Override
    public void subscribe(Flow.Subscriber<? super Event> events) {
        boolean isFirst;
        synchronized (this) {
            isFirst = subscriber == null;
            isDraining = isFirst || isDraining;
            subscriber = isFirst ? events : subscriber;
        }
        events.onSubscribe(isFirst ? new Demand() : new Flow.Subscription() {
            @Override
            public void request(long count) {}

            @Override
            public void cancel() {}
        });
        if (isFirst) {
            synchronized (this) {
                isDraining = false;
            }
            drain();
        } else {
            events.onError(new IllegalStateException("a stream of events has one subscriber"));
        }
    }

    /** Ends generation, unless the stream has ended. */
    @Override
    public void close() {
        synchronized (this) {
            isFinished = true;
            isSignalled = true;
            ready.clear();
        }
        call.abort(new CancellationException("the stream was closed"));
    }

    private final class Demand implements Flow.Subscription {
        @Override
        public void request(long count) {
            synchronized (EventPublisher.this) {
                demand = count <= 0 || demand + count < 0 ? Long.MAX_VALUE : demand + count;
            }
            if (count <= 0) {
                call.abort(new IllegalArgumentException("request at least one event"));
            }
            drain();
        }

        @Override
        public void cancel() {
            close();
        }
    }

    /** Gives events while there is demand, on one thread at a time; then reads more, or ends. */
    private void drain() {
        synchronized (this) {
            if (isDraining || subscriber == null) {
                return;
            }
            isDraining = true;
        }
        while (true) {
            Event next = null;
            boolean isEnd = false;
            synchronized (this) {
                if (!ready.isEmpty() && demand > 0) {
                    next = ready.poll();
                    demand--;
                } else if (ready.isEmpty() && isFinished && !isSignalled) {
                    isSignalled = true;
                    isEnd = true;
                } else if (ready.isEmpty() && !isFinished && demand > 0 && !isReading) {
                    isReading = true;
                } else {
                    isDraining = false;
                    return;
                }
            }
            if (next != null) {
                give(next);
            } else if (!isEnd) {
                current().more();
            } else if (failure == null) {
                subscriber.onComplete();
            } else {
                subscriber.onError(failure);
            }
        }
    }

    private synchronized Events current() {
        return reading;
    }

    /** Reads a repeat of an answer that broke off. */
    private synchronized Events repeat(HttpResponse<Flow.Publisher<List<ByteBuffer>>> response) {
        resumption.repeat();
        reading = new Events(response);
        return reading;
    }

    private void give(Event event) {
        try {
            subscriber.onNext(event);
        } catch (RuntimeException error) {
            call.abort(error);
        }
    }

    private void finish(Throwable error) {
        synchronized (this) {
            failure = isFinished ? failure : error;
            isFinished = true;
        }
        drain();
    }

    private final class Events extends Reading {
        private final SseParser parser = new SseParser();
        private boolean isOver;

        Events(HttpResponse<Flow.Publisher<List<ByteBuffer>>> response) {
            super(EventPublisher.this.call, response);
        }

        @Override
        void subscribed() {
            synchronized (EventPublisher.this) {
                isReading = false;
            }
            EventPublisher.this.call.result.complete(EventPublisher.this);
            drain();
        }

        @Override
        void take(List<ByteBuffer> pieces) {
            try {
                for (var piece : pieces) {
                    parser.feed(piece).forEach(this::event);
                }
            } catch (SwitchyardException error) {
                fail(error);
                return;
            }
            synchronized (EventPublisher.this) {
                isReading = false;
            }
            drain();
        }

        private void event(SseParser.Raw raw) {
            if (new String(raw.data(), StandardCharsets.UTF_8).equals("[DONE]")) {
                isOver = true;
                return;
            }
            var document = object(raw.data());
            var error = document.get("error");
            if (error != null && !error.equals("") && !"response".equals(document.get("object"))) {
                throw new ApiException(response.statusCode(), raw.data(), Call.headersOf(response));
            }
            isOver |= LAST.contains(raw.name().isEmpty() ? Json.text(document, "type") : raw.name());
            var event = new Event(raw.name(), document);
            synchronized (EventPublisher.this) {
                (resumption == null ? Optional.of(event) : resumption.fresh(event)).ifPresent(ready::add);
            }
        }

        @Override
        void ended() {
            if (isOver) {
                call.finish();
                finish(null);
            } else {
                broke(broken("ended before its last event", null));
            }
        }

        @Override
        void broke(SwitchyardException error) {
            synchronized (EventPublisher.this) {
                isReading = true;
            }
            boolean canRepeat = error instanceof BrokenOffException && resumption != null && resumption.canRepeat();
            if (!canRepeat || !EventPublisher.this.call.repeat(this, (call, next) -> repeat(next))) {
                call.finish();
                finish(error);
            }
        }

        @Override
        void stopped(Throwable error) {
            finish(error);
        }
    }
}
