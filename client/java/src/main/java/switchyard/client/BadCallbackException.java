package switchyard.client;

/** A callback that is not from the fleet or is too old. Respond with 400. */
public final class BadCallbackException extends SwitchyardException {
    private static final long serialVersionUID = 1L;

    BadCallbackException(String message, Throwable cause) {
        super(message, cause);
    }
}
