package switchyard.client;

import java.io.IOException;
import java.io.InputStream;
import java.net.InetSocketAddress;
import java.net.ProxySelector;
import java.net.URI;
import java.net.http.HttpClient;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Executor;
import java.util.function.Supplier;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

/** Options of a client, set by methods that return the same object. */
public final class ClientOptions {
    final List<String> regions;
    String apiKey;
    String servingClass;
    Duration hedgeAfter;
    Retries retries = Retries.DEFAULT;
    Duration connect = Duration.ofSeconds(5);
    Duration silence = Duration.ofSeconds(600);
    Supplier<Map<String, String>> trace = Map::of;
    private ProxySelector proxy = HttpClient.Builder.NO_PROXY;
    private SSLContext tls;

    ClientOptions(List<String> regions) {
        if (regions.isEmpty()) {
            throw new IllegalArgumentException(
                    "name the base URL of at least one region, such as https://us-east-1.example.com/v1");
        }
        this.regions = regions.stream().map(ClientOptions::checked).toList();
    }

    private static String checked(String url) {
        var uri = URI.create(url);
        if (uri.getHost() == null || !"http".equals(uri.getScheme()) && !"https".equals(uri.getScheme())) {
            throw new IllegalArgumentException(url + " is no base URL, such as https://us-east-1.example.com/v1");
        }
        return url.replaceAll("/+$", "");
    }

    public ClientOptions apiKey(String key) {
        apiKey = key;
        return this;
    }

    /** {@code realtime}, {@code near_realtime} or {@code batch}, for all calls. */
    public ClientOptions servingClass(String name) {
        servingClass = name;
        return this;
    }

    /** Without a first byte by then, the next region is tried as well, and the first answer wins; default: never. */
    public ClientOptions hedgeAfter(Duration time) {
        hedgeAfter = time;
        return this;
    }

    public ClientOptions retries(Retries bounds) {
        retries = bounds;
        return this;
    }

    /** Maximum time to connect; 5 s by default. */
    public ClientOptions connect(Duration time) {
        connect = time;
        return this;
    }

    /** Maximum time between bytes; 600 s by default. */
    public ClientOptions silence(Duration time) {
        silence = time;
        return this;
    }

    /** Returns headers for each attempt, such as {@code traceparent}. */
    public ClientOptions trace(Supplier<Map<String, String>> headers) {
        trace = headers;
        return this;
    }

    /** Sends requests through a proxy; by default none is used, whatever the system properties name. */
    public ClientOptions proxy(InetSocketAddress address) {
        proxy = ProxySelector.of(address);
        return this;
    }

    /** Trusts only the authorities in this PEM file, instead of those of the JDK. */
    public ClientOptions caFile(Path pem) {
        try (InputStream in = Files.newInputStream(pem)) {
            var store = KeyStore.getInstance(KeyStore.getDefaultType());
            store.load(null, null);
            for (var certificate : CertificateFactory.getInstance("X.509").generateCertificates(in)) {
                store.setCertificateEntry("ca-" + store.size(), certificate);
            }
            if (store.size() == 0) {
                throw new IllegalArgumentException(pem + " has no certificate");
            }
            var trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
            trust.init(store);
            var context = SSLContext.getInstance("TLS");
            context.init(null, trust.getTrustManagers(), null);
            return tls(context);
        } catch (IOException | GeneralSecurityException error) {
            throw new IllegalArgumentException(pem + " cannot be read: " + error.getMessage(), error);
        }
    }

    /** Uses this context, such as one with a client's certificate. */
    public ClientOptions tls(SSLContext context) {
        tls = context;
        return this;
    }

    /** Makes a client that blocks. */
    public Switchyard build() {
        return new Switchyard(buildAsync());
    }

    /** Makes a client that returns futures. */
    public AsyncSwitchyard buildAsync() {
        return new AsyncSwitchyard(this);
    }

    HttpClient http(Executor executor) {
        var http = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).connectTimeout(connect)
                .followRedirects(HttpClient.Redirect.NEVER).proxy(proxy).executor(executor);
        return (tls == null ? http : http.sslContext(tls)).build();
    }
}
