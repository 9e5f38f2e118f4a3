package otlp

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Pauses between the attempts to send a trace. Each is twice as long as the one before, less a
// random part.
const (
	firstPause   = time.Second
	longestPause = time.Minute
)

// maxAnswer bounds what is read of a collector's answer, in bytes.
const maxAnswer = 64 << 10

// client returns an HTTP client for the collector. It follows no redirects: the headers may have
// secrets.
func (c Config) client() *http.Client {
	transport, ok := http.DefaultTransport.(*http.Transport)
	if !ok {
		transport = &http.Transport{Proxy: http.ProxyFromEnvironment}
	}
	transport = transport.Clone()
	transport.TLSClientConfig = c.TLS
	transport.MaxResponseHeaderBytes = maxAnswer
	return &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// refusal is an answer by which the collector will never take a trace.
type refusal struct{ err error }

func (r *refusal) Error() string { return r.err.Error() }

func (r *refusal) Unwrap() error { return r.err }

// laterError is an answer that asks for another attempt after a pause.
type laterError struct {
	err   error
	pause time.Duration
}

func (l *laterError) Error() string { return l.err.Error() }

func (l *laterError) Unwrap() error { return l.err }

// post sends a trace within the timeout of a request. It returns a [*refusal] if the collector will
// not take it; any other error may pass.
func (t *Tracer) post(ctx context.Context, text []byte) error {
	ctx, cancel := context.WithTimeoutCause(ctx, t.config.Timeout, fmt.Errorf("no answer within %s", t.config.Timeout))
	defer cancel()
	if t.config.Compress {
		var packed bytes.Buffer
		w := gzip.NewWriter(&packed)
		if _, err := w.Write(text); err != nil {
			return &refusal{err}
		}
		if err := w.Close(); err != nil {
			return &refusal{err}
		}
		text = packed.Bytes()
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, t.config.Endpoint.String(), bytes.NewReader(text))
	if err != nil {
		return &refusal{err}
	}
	for key, values := range t.config.Headers {
		r.Header[key] = values
	}
	r.Header.Set("Content-Type", "application/x-protobuf")
	r.Header.Set("User-Agent", "ckptstore/"+t.options.Version)
	if t.config.Compress {
		r.Header.Set("Content-Encoding", "gzip")
	}
	answer, err := t.client.Do(r)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return withoutURL(err)
	}
	defer func() { _ = answer.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	switch status := answer.StatusCode; {
	case status/100 == 2:
		if err != nil { // it may have the trace: sent again, it is the same one
			return err
		}
		if spans, why := rejected(body); spans > 0 {
			return &refusal{fmt.Errorf("it rejected %d spans: %s", spans, oneLine(why))}
		}
		return nil
	case status == http.StatusTooManyRequests, status == http.StatusBadGateway, status == http.StatusServiceUnavailable, status == http.StatusGatewayTimeout:
		seconds, _ := strconv.Atoi(answer.Header.Get("Retry-After")) // absent: as after any failure
		return &laterError{fmt.Errorf("it answered %s", answer.Status), time.Duration(min(max(0, seconds), int(longestPause/time.Second))) * time.Second}
	default:
		return &refusal{fmt.Errorf("it answered %s", strings.TrimSpace(answer.Status+" "+describe(answer, body)))}
	}
}

// describe returns an answer in text; one of another kind is left out.
func describe(answer *http.Response, body []byte) string {
	if kind := answer.Header.Get("Content-Type"); !strings.HasPrefix(kind, "text/plain") && !strings.HasPrefix(kind, "application/json") {
		return ""
	}
	return oneLine(string(body[:min(len(body), 300)]))
}

func oneLine(s string) string {
	return strings.ToValidUTF8(strings.Join(strings.Fields(s), " "), "\uFFFD")
}

// withoutURL removes the URL from an error of a request: it may have a password, and the log line
// has the endpoint.
func withoutURL(err error) error {
	var of *url.Error
	if errors.As(err, &of) {
		return of.Err
	}
	return err
}

// send delivers the traces of the queue, one after another, until ctx ends.
func (t *Tracer) send(ctx context.Context, handled func()) {
	for {
		it, err := t.queue.next(ctx)
		if err != nil {
			return
		}
		reason, err := t.deliver(ctx, it)
		if err != nil { // the cursor stays before the trace
			t.queue.stop()
			return
		}
		t.queue.finish(reason)
		handled()
	}
}

// deliver sends a trace until the collector has taken or refused it. It returns an error only when
// ctx ends.
func (t *Tracer) deliver(ctx context.Context, it item) (reason string, err error) {
	for pause := t.pause; ; pause = min(2*pause, longestPause) {
		err := t.post(ctx, it.text)
		var no *refusal
		switch {
		case err == nil:
			t.answered()
			return "", nil
		case ctx.Err() != nil:
			return "", context.Cause(ctx)
		case errors.As(err, &no):
			t.failed("collector refused a trace; it is dropped", it, err)
			return dropRefused, nil
		}
		t.failed("collector does not take traces; they wait in a queue", it, err)
		wait := pause - rand.N(pause/4+1) //nolint:gosec // no secret
		var later *laterError
		if errors.As(err, &later) {
			wait = max(wait, later.pause)
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-t.leave:
			timer.Stop()
			return "", errLeaving
		case <-ctx.Done():
			timer.Stop()
			return "", context.Cause(ctx)
		}
	}
}

// failed logs the first failure after a success. The others are in the metrics.
func (t *Tracer) failed(message string, it item, err error) {
	if t.down.Swap(true) {
		return
	}
	t.options.Logger.Warn(message, "collector", t.config.Endpoint.Redacted(), "trace", it.what, "error", err)
}

// answered logs the first success after a failure.
func (t *Tracer) answered() {
	if !t.down.Swap(false) {
		return
	}
	c := t.queue.counts()
	t.options.Logger.Info("collector takes traces again", "collector", t.config.Endpoint.Redacted(), "waiting", c.Waiting, "dropped", sum(c.Dropped))
}

func sum(of map[string]uint64) (all uint64) {
	for _, n := range of {
		all += n
	}
	return all
}
