package switchyard.client;

/** The deadline of the call passed first. */
public final class DeadlineExceededException extends SwitchyardException {
    private static final long serialVersionUID = 1L;

    DeadlineExceededException(String message, Throwable cause) {
        super(message, cause);
    }
}
