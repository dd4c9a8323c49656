package switchyard.client;

/** Base class of this client's errors. */
public class SwitchyardException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    SwitchyardException(String message, Throwable cause) {
        super(message, cause);
    }
}
