package switchyard.client;

/**
 * An answer was incomplete. The received part is valid; the request had started, so it was not sent
 * again, unless {@link CallOptions#resuming} asks for that.
 */
public final class BrokenOffException extends SwitchyardException {
    private static final long serialVersionUID = 1L;

    BrokenOffException(String message, Throwable cause) {
        super(message, cause);
    }
}
