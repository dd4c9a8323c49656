package switchyard.client;

import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;

/**
 * A client of one or several regions' ingresses, whose methods block. Threads may share it. Close it when it is no
 * longer used.
 *
 * <p>An interrupt of a waiting thread ends the request: {@link CancellationException}, and the thread stays
 * interrupted.
 */
public final class Switchyard implements AutoCloseable {
    private final AsyncSwitchyard client;

    Switchyard(AsyncSwitchyard client) {
        this.client = client;
    }

    /** Names the regions' base URLs, home first ({@code https://us-east-1.example.com/v1}). */
    public static ClientOptions of(String... regions) {
        return new ClientOptions(List.of(regions));
    }

    /** The same client with futures; it shares connections and what is known of regions. */
    public AsyncSwitchyard async() {
        return client;
    }

    /**
     * Sends a body and waits for the complete answer.
     *
     * @param path any of docs/api-applications.md; {@code /v1} may be omitted
     * @throws ApiException refused, also after retries
     * @throws NoAnswerException no region answered
     * @throws DeadlineExceededException the deadline passed
     * @throws BrokenOffException the answer was incomplete
     */
    public Answer post(String path, Body body, CallOptions options) {
        return await(client.post(path, body, options));
    }

    public Answer post(String path, Body body) {
        return post(path, body, CallOptions.NONE);
    }

    /** Reads a path, such as {@code /usage}; throws as {@link #post(String, Body, CallOptions)}. */
    public Answer get(String path, CallOptions options) {
        return await(client.get(path, options));
    }

    public Answer get(String path) {
        return get(path, CallOptions.NONE);
    }

    /**
     * Sends a body with {@code "stream": true} and returns its events. Close them: that ends generation early, and an
     * unread stream keeps its connection.
     *
     * @throws SwitchyardException as {@link #post(String, Body, CallOptions)}; also {@link EventStream#hasNext}
     */
    public EventStream stream(String path, Body body, CallOptions options) {
        return new EventStream(await(client.stream(path, body, options)));
    }

    public EventStream stream(String path, Body body) {
        return stream(path, body, CallOptions.NONE);
    }

    public Answer chat(Chat chat, CallOptions options) {
        return await(client.chat(chat, options));
    }

    public Answer chat(Chat chat) {
        return chat(chat, CallOptions.NONE);
    }

    public EventStream streamChat(Chat chat, CallOptions options) {
        return new EventStream(await(client.streamChat(chat, options)));
    }

    public EventStream streamChat(Chat chat) {
        return streamChat(chat, CallOptions.NONE);
    }

    /** {@code POST /embeddings}; {@link Answer#embeddings} has the vectors. */
    public Answer embeddings(Embeddings body, CallOptions options) {
        return await(client.embeddings(body, options));
    }

    public Answer embeddings(Embeddings body) {
        return embeddings(body, CallOptions.NONE);
    }

    /** The models that the key may use. */
    public List<Map<String, Object>> models() {
        return await(client.models());
    }

    /** Submits a near-real-time request for {@code /chat/completions} or {@code /completions}. */
    public Pending submit(String path, Body body, SubmitOptions options) {
        return await(client.submit(path, body, options));
    }

    /** Gets the state of a near-real-time request, from any region of the fleet. */
    public Pending retrieve(String id) {
        return await(client.retrieve(id));
    }

    /** Cancels it, unless it has ended. */
    public Pending cancel(String id) {
        return await(client.cancel(id));
    }

    /**
     * Polls until the request has ended.
     *
     * @throws DeadlineExceededException it has not ended by then, and continues
     */
    public Pending waitFor(String id, Duration timeout) {
        return await(client.waitFor(id, timeout, AsyncSwitchyard.FIRST_POLL));
    }

    /** Ends open calls and the client's threads. */
    @Override
    public void close() {
        client.close();
    }

    private static <T> T await(CompletableFuture<T> future) {
        try {
            return future.get();
        } catch (InterruptedException error) {
            future.cancel(true);
            Thread.currentThread().interrupt();
            throw new CancellationException("the waiting thread was interrupted");
        } catch (ExecutionException error) {
            throw thrown(error.getCause());
        }
    }

    /** Adds the stack of the waiting thread to an error of another thread. */
    static RuntimeException thrown(Throwable error) {
        if (error instanceof RuntimeException ours) {
            if (ours.getSuppressed().length == 0) {
                ours.addSuppressed(new IllegalStateException("waited for here"));
            }
            return ours;
        }
        if (error instanceof Error theirs) {
            throw theirs;
        }
        return new SwitchyardException(String.valueOf(error.getMessage()), error);
    }
}
