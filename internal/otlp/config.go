package otlp

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// Environment variables of OpenTelemetry that name the collector. Those of the second group have a
// variant for traces alone, which overrides them: OTEL_EXPORTER_OTLP_TRACES_HEADERS and the like.
const (
	envService    = "OTEL_SERVICE_NAME"
	envAttributes = "OTEL_RESOURCE_ATTRIBUTES"

	envEndpoint    = "ENDPOINT"
	envHeaders     = "HEADERS"
	envTimeout     = "TIMEOUT" // milliseconds
	envProtocol    = "PROTOCOL"
	envCompression = "COMPRESSION"
	envCA          = "CERTIFICATE"
	envCert        = "CLIENT_CERTIFICATE"
	envKey         = "CLIENT_KEY"

	envAll    = "OTEL_EXPORTER_OTLP_"
	envTraces = "OTEL_EXPORTER_OTLP_TRACES_"
)

// Defaults of the variables.
const (
	defaultService = "ckptstore"
	defaultTimeout = 10 * time.Second
	protobuf       = "http/protobuf"
	tracesPath     = "/v1/traces"
)

// Config is how to reach a collector, and what the traces come from.
type Config struct {
	Endpoint   *url.URL // of the traces
	Headers    http.Header
	Timeout    time.Duration // of one request and its answer
	Compress   bool
	TLS        *tls.Config
	Service    string
	Attributes map[string]string // of the resource
}

// FromEnvironment reads the standard variables. Without an endpoint, and for values that do not
// work, it returns an error that names the variable and not its value, which may have secrets.
func FromEnvironment(getenv func(string) string) (c Config, err error) {
	bad := func(name, format string, args ...any) error {
		return problem.Errorf(problem.Invalid, "--traces: $%s: "+format, append([]any{name}, args...)...)
	}
	// get returns a value and the name of the variable that has it.
	get := func(suffix string) (value, name string) {
		if v := strings.TrimSpace(getenv(envTraces + suffix)); v != "" {
			return v, envTraces + suffix
		}
		return strings.TrimSpace(getenv(envAll + suffix)), envAll + suffix
	}
	value, name := get(envEndpoint)
	if value == "" {
		return c, problem.Errorf(problem.Invalid, "--traces: no collector is named: set $%s%s to the URL of a receiver of OTLP over HTTP, such as http://127.0.0.1:4318", envAll, envEndpoint)
	}
	if c.Endpoint, err = url.Parse(value); err != nil || c.Endpoint.Scheme != "http" && c.Endpoint.Scheme != "https" || c.Endpoint.Hostname() == "" {
		return c, bad(name, "want an http or https URL, such as http://127.0.0.1:4318")
	}
	if name == envAll+envEndpoint {
		c.Endpoint = c.Endpoint.JoinPath(tracesPath)
	}
	if value, name = get(envProtocol); value != "" && value != protobuf {
		return c, bad(name, "only %s is supported, which collectors receive on port 4318: set it, or the variant for traces, to %s", protobuf, protobuf)
	}
	c.Timeout = defaultTimeout
	if value, name = get(envTimeout); value != "" {
		ms, err := strconv.ParseUint(value, 10, 31)
		if err != nil || ms == 0 {
			return c, bad(name, "want milliseconds, such as 10000")
		}
		c.Timeout = time.Duration(ms) * time.Millisecond
	}
	switch value, name = get(envCompression); value {
	case "", "none":
	case "gzip":
		c.Compress = true
	default:
		return c, bad(name, "want gzip or none")
	}
	value, name = get(envHeaders)
	headers, ok := pairs(value)
	if !ok {
		return c, bad(name, "want NAME=VALUE, with commas between, and values percent-encoded")
	}
	c.Headers = http.Header{}
	for key, v := range headers {
		if !headerName.MatchString(key) || strings.ContainsFunc(v, unicode.IsControl) {
			return c, bad(name, "it has a header that HTTP does not allow")
		}
		c.Headers.Set(key, v)
	}
	if c.Attributes, ok = pairs(getenv(envAttributes)); !ok {
		return c, bad(envAttributes, "want NAME=VALUE, with commas between, and values percent-encoded")
	}
	c.Service = cmp.Or(strings.TrimSpace(getenv(envService)), c.Attributes["service.name"], defaultService)
	delete(c.Attributes, "service.name")
	c.TLS, err = secure(get)
	return c, err
}

// headerName matches the names of headers.
var headerName = regexp.MustCompile("^[-!#$%&'*+.^_`|~0-9A-Za-z]+$")

// secure returns the TLS configuration, nil for the default.
func secure(get func(suffix string) (value, name string)) (*tls.Config, error) {
	bad := func(name string, err error) error {
		return problem.Wrap(problem.Invalid, fmt.Errorf("--traces: $%s: %w", name, err))
	}
	ca, caName := get(envCA)
	cert, certName := get(envCert)
	key, keyName := get(envKey)
	if ca == "" && cert == "" && key == "" {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, bad(caName, err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, bad(caName, fmt.Errorf("%s has no certificate in PEM", ca))
		}
	}
	if (cert == "") != (key == "") {
		return nil, problem.Errorf(problem.Invalid, "--traces: a client's certificate needs its key, and a key its certificate: set $%s and $%s", certName, keyName)
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, bad(certName, err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// pairs decodes a list such as a=1,b=2 with percent-encoded values.
func pairs(list string) (map[string]string, bool) {
	out := map[string]string{}
	for item := range strings.SplitSeq(list, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		key, value, ok := strings.Cut(item, "=")
		key = strings.TrimSpace(key)
		value, err := url.PathUnescape(strings.TrimSpace(value))
		if !ok || key == "" || err != nil {
			return nil, false
		}
		out[key] = value
	}
	return out, true
}

// attributes returns the attributes of the resource, sorted.
func (c Config) attributes() (keys []string) {
	return slices.Sorted(maps.Keys(c.Attributes))
}
