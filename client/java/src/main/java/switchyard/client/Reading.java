package switchyard.client;

import java.io.ByteArrayOutputStream;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Flow;
import java.util.concurrent.Future;
import java.util.function.Consumer;

/** Reads the body of one answer, a piece at a time, and gives up after a silence. */
abstract class Reading implements Flow.Subscriber<List<ByteBuffer>> {
    final Call<?> call;
    final HttpResponse<Flow.Publisher<List<ByteBuffer>>> response;
    private Flow.Subscription upstream;
    private Future<?> silence = CompletableFuture.completedFuture(null);
    private boolean isStopped;

    Reading(Call<?> call, HttpResponse<Flow.Publisher<List<ByteBuffer>>> response) {
        this.call = call;
        this.response = response;
    }

    /** Closes the connection of an answer that nothing reads. */
    static void discard(HttpResponse<Flow.Publisher<List<ByteBuffer>>> response) {
        response.body().subscribe(new Flow.Subscriber<>() {
            @Override
            public void onSubscribe(Flow.Subscription subscription) {
                subscription.cancel();
            }

            @Override
            public void onNext(List<ByteBuffer> pieces) {}

            @Override
            public void onError(Throwable error) {}

            @Override
            public void onComplete() {}
        });
    }

    void begin() {
        response.body().subscribe(this);
    }

    /** Takes a piece; calls {@link #more} for the next one. */
    abstract void take(List<ByteBuffer> pieces);

    /** The body is complete. It is called once, or not if the reading was stopped or broke off. */
    abstract void ended();

    /** The body is incomplete, or not what it should be. */
    void broke(SwitchyardException error) {
        call.abort(error);
    }

    /** The call ended, maybe before its body; the connection is being closed. */
    void stopped(Throwable error) {}

    final void more() {
        Flow.Subscription from;
        synchronized (this) {
            if (isStopped || upstream == null) {
                return;
            }
            from = upstream;
            silence = call.client.after(call.client.options.silence, this::silent, call.result);
        }
        from.request(1);
    }

    final void stop(Throwable error) {
        if (leave()) {
            stopped(error);
        }
    }

    /** Closes the connection. Returns false if the body has ended. */
    private boolean leave() {
        Flow.Subscription from;
        synchronized (this) {
            if (!end()) {
                return false;
            }
            from = upstream;
        }
        if (from != null) {
            from.cancel();
        }
        return true;
    }

    /** Gives up an answer that is not what it should be. */
    final void fail(SwitchyardException error) {
        if (leave()) {
            broke(error);
        }
    }

    @Override
    public final void onSubscribe(Flow.Subscription subscription) {
        synchronized (this) {
            upstream = subscription;
            if (isStopped) {
                subscription.cancel();
                return;
            }
        }
        subscribed();
    }

    void subscribed() {
        more();
    }

    @Override
    public final void onNext(List<ByteBuffer> pieces) {
        synchronized (this) {
            silence.cancel(false);
            if (isStopped) {
                return;
            }
        }
        take(pieces);
    }

    @Override
    public final void onError(Throwable error) {
        if (end()) {
            broke(broken("broke off: " + Call.told(error), error));
        }
    }

    @Override
    public final void onComplete() {
        if (end()) {
            ended();
        }
    }

    final BrokenOffException broken(String how, Throwable cause) {
        return new BrokenOffException("the answer of " + response.uri() + " " + how, cause);
    }

    private synchronized boolean end() {
        silence.cancel(false);
        boolean isFirst = !isStopped;
        isStopped = true;
        return isFirst;
    }

    private void silent() {
        var time = AsyncSwitchyard.seconds(call.client.options.silence);
        fail(broken("broke off: no byte for " + time + " s", null));
    }

    /** A whole answer, which is a JSON object. */
    static final class Whole extends Reading {
        private final ByteArrayOutputStream body = new ByteArrayOutputStream();
        private final Call<Answer> answered;

        Whole(Call<Answer> call, HttpResponse<Flow.Publisher<List<ByteBuffer>>> response) {
            super(call, response);
            answered = call;
        }

        @Override
        void take(List<ByteBuffer> pieces) {
            pieces.forEach(piece -> write(piece, body));
            more();
        }

        @Override
        void broke(SwitchyardException error) {
            if (!answered.repeat(this, Whole::new)) {
                call.abort(error);
            }
        }

        @Override
        void ended() {
            try {
                var headers = Call.headersOf(response);
                var answer = new Answer(object(body.toByteArray()), headers, call.attempts());
                call.finish();
                answered.result.complete(answer);
            } catch (BrokenOffException problem) {
                broke(problem);
            }
        }
    }

    /** The body of a refusal, or as much of it as arrives. */
    static final class Refusal extends Reading {
        private static final int MAX_BYTES = 64 * 1024;
        private final ByteArrayOutputStream body = new ByteArrayOutputStream();
        private final Consumer<ApiException> then;

        Refusal(
                Call<?> call,
                HttpResponse<Flow.Publisher<List<ByteBuffer>>> response,
                Consumer<ApiException> then) {
            super(call, response);
            this.then = then;
        }

        @Override
        void take(List<ByteBuffer> pieces) {
            pieces.forEach(piece -> write(piece, body));
            if (body.size() > MAX_BYTES) {
                stop(null);
                ended();
            } else {
                more();
            }
        }

        @Override
        void broke(SwitchyardException error) {
            ended();
        }

        @Override
        void ended() {
            then.accept(new ApiException(response.statusCode(), body.toByteArray(), Call.headersOf(response)));
        }
    }

    final Map<String, Object> object(byte[] content) {
        try {
            if (Json.parse(content) instanceof Map<?, ?> found) {
                return Json.object(found);
            }
        } catch (Json.Malformed error) {
            throw broken("is no JSON object: " + error.getMessage(), error);
        }
        throw broken("is no JSON object", null);
    }

    private static void write(ByteBuffer piece, ByteArrayOutputStream out) {
        var bytes = new byte[piece.remaining()];
        piece.get(bytes);
        out.writeBytes(bytes);
    }
}
