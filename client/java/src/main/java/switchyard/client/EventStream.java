package switchyard.client;

import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.concurrent.CancellationException;
import java.util.concurrent.Flow;
import java.util.concurrent.LinkedBlockingQueue;

/** The events of one stream, read by a loop. Close it: that ends generation if the loop was left early. */
public final class EventStream implements Iterable<Event>, Iterator<Event>, AutoCloseable {
    private static final int AHEAD = 64;
    private static final Object END = new Object();

    private final EventPublisher events;
    private final LinkedBlockingQueue<Object> taken = new LinkedBlockingQueue<>();
    private Flow.Subscription subscription;
    private Object next;

    EventStream(EventPublisher events) {
        this.events = events;
        events.subscribe(new Flow.Subscriber<>() {
            @Override
            public void onSubscribe(Flow.Subscription given) {
                subscription = given;
                given.request(AHEAD);
            }

            @Override
            public void onNext(Event event) {
                taken.add(event);
            }

            @Override
            public void onError(Throwable error) {
                taken.add(error);
            }

            @Override
            public void onComplete() {
                taken.add(END);
            }
        });
    }

    @Override
    public Iterator<Event> iterator() {
        return this;
    }

    /**
     * Waits for the next event.
     *
     * @throws SwitchyardException the stream broke off, or its deadline passed
     */
    @Override
    public boolean hasNext() {
        if (next == null) {
            try {
                next = taken.take();
            } catch (InterruptedException error) {
                close();
                Thread.currentThread().interrupt();
                throw new CancellationException("the waiting thread was interrupted");
            }
            if (next instanceof Event) {
                subscription.request(1);
            }
        }
        if (next instanceof Throwable error) {
            throw Switchyard.thrown(error);
        }
        return next != END;
    }

    @Override
    public Event next() {
        if (!hasNext()) {
            throw new NoSuchElementException("the stream has ended");
        }
        var event = (Event) next;
        next = null;
        return event;
    }

    /** Ends generation, unless the stream has ended. */
    @Override
    public void close() {
        events.close();
        taken.clear();
        taken.add(END);
        next = next instanceof Throwable ? next : END;
    }
}
