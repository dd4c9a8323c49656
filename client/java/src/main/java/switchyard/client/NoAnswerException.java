package switchyard.client;

/** No region sent a byte of an answer; the message has the last attempt of each. */
public final class NoAnswerException extends SwitchyardException {
    private static final long serialVersionUID = 1L;

    NoAnswerException(String message, Throwable cause) {
        super(message, cause);
    }
}
