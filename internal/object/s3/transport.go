package s3

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"time"

	minio "github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/signer"
)

const (
	connectTime = 5 * time.Second
	tlsTime     = 10 * time.Second
	bufferSize  = 256 << 10
)

// call is one attempt of a request, from do to the transport and back.
type call struct {
	class  class
	header http.Header   // to add to the request
	body   *gather       // its body; nil: the client's, or none
	first  time.Duration // until the answer begins, after the request was sent
	try    int           // number of the attempt
	fresh  bool          // it gets a connection of its own
	core   *minio.Core

	used   credentials.Value
	answer http.Header // of the response
	status int
}

type callKey struct{}

func with(ctx context.Context, c *call) context.Context { return context.WithValue(ctx, callKey{}, c) }

// transport sends every request: it signs, counts and watches it.
type transport struct {
	base     http.RoundTripper
	fresh    http.RoundTripper // with a connection for each request; nil: base has what connections there are
	keys     *keyring
	header   http.Header // of every request
	patience patience
	counts   counts
	sent     flow // bodies of requests
	received flow // bodies of answers

	// ignoresExpect is set if the server, or a proxy, sends no 100 Continue.
	ignoresExpect atomic.Bool

	mu     sync.Mutex
	region string
}

// A body of this size is sent after the server has sent 100 Continue, as Amazon's clients do: one
// round trip for each part. A server that refuses one of twenty at random would otherwise receive
// each of these bodies whole before it refuses, and a save would take 1.7 times as long.
const askFrom = 1 << 20

// continueTime is how long a request waits for the server to agree, and then sends its body.
const continueTime = time.Second

// connections returns connections of HTTP/1.1: of a higher version, all requests would share
// one.
func connections(depth int, pool *x509.CertPool) *http.Transport {
	return &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: connectTime, KeepAlive: 15 * time.Second}).DialContext,
		TLSHandshakeTimeout:   tlsTime,
		TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool},
		TLSNextProto:          map[string]func(string, *tls.Conn) http.RoundTripper{},
		MaxIdleConnsPerHost:   depth,
		IdleConnTimeout:       30 * time.Second,
		WriteBufferSize:       bufferSize,
		ReadBufferSize:        bufferSize,
		DisableCompression:    true, // an object's bytes are those that were stored
		ExpectContinueTimeout: continueTime,
	}
}

func (t *transport) setRegion(region string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.region = region
}

// regionToSign returns the region of signatures. The question for a bucket's own is answered
// in the first.
func (t *transport) regionToSign() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.region == "" {
		return "us-east-1"
	}
	return t.region
}

// RoundTrip implements [http.RoundTripper].
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	c, _ := req.Context().Value(callKey{}).(*call)
	if c == nil {
		c = &call{first: t.patience.first}
	}
	var err error
	if c.used, err = t.keys.get(req.Context()); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	w := newWatch(t.patience.of(c.try), cancel)
	var agreed atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		WroteRequest:   func(httptrace.WroteRequestInfo) { w.sent(c.first) },
		Got100Continue: func() { agreed.Store(true) },
	})
	req = req.Clone(ctx)
	for _, header := range []http.Header{t.header, c.header} {
		for name, values := range header {
			req.Header[name] = values
		}
	}
	req.Header.Set("X-Amz-Content-Sha256", "UNSIGNED-PAYLOAD") // checksums and TLS protect it
	req = signer.SignV4(*req, c.used.AccessKeyID, c.used.SecretAccessKey, c.used.SessionToken, t.regionToSign())
	asks := req.ContentLength >= askFrom && !t.ignoresExpect.Load()
	if asks {
		req.Header.Set("Expect", "100-continue") // not signed: it is between two ends of a connection
	}
	if req.Body != nil && req.Body != http.NoBody {
		leave := t.sent.enter()
		req.Body = &sending{body: req.Body, watch: w, counts: &t.counts, flow: &t.sent, leave: leave}
	}
	t.counts.began(c.class)
	base := t.base
	if c.fresh && t.fresh != nil {
		base = t.fresh
	}
	res, err := base.RoundTrip(req)
	if err != nil {
		w.end()
		if cause := w.cause(); cause != nil {
			err = cause
		}
		cancel(nil)
		return nil, err
	}
	w.answered()
	if asks && !agreed.Load() && (res.StatusCode/100 == 2 || res.StatusCode == http.StatusExpectationFailed) {
		t.ignoresExpect.Store(true)
	}
	c.status, c.answer = res.StatusCode, res.Header
	// A server that may take long for an answer may also take long for its body.
	window := max(w.patience.window, c.first)
	res.Body = &receiving{body: res.Body, watch: w, cancel: cancel, counts: &t.counts, flow: &t.received, leave: t.received.enter(), window: window}
	if c.class != classGet && c.class != classComplete && c.class != classHead && res.StatusCode/100 == 2 {
		refuseError(res)
	}
	return res, nil
}

// refuseError gives a success whose body is an error the status of a failure. The client does
// so itself where Amazon's documentation demands it, for the completion of uploads.
func refuseError(res *http.Response) {
	if res.ContentLength == 0 {
		return
	}
	body := bufio.NewReaderSize(res.Body, 512)
	res.Body = struct {
		io.Reader
		io.Closer
	}{body, res.Body}
	begin, _ := body.Peek(512) // an error is that of the next read
	begin = bytes.TrimLeft(begin, "\xef\xbb\xbf \t\r\n")
	if bytes.HasPrefix(begin, []byte("<?xml")) {
		_, begin, _ = bytes.Cut(begin, []byte("?>"))
		begin = bytes.TrimLeft(begin, " \t\r\n")
	}
	if bytes.HasPrefix(begin, []byte("<Error")) {
		res.StatusCode, res.Status = http.StatusInternalServerError, "500 an error with the status of a success"
	}
}
