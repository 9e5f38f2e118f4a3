package faultproxy

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/object/sigv4"
)

// hopHeaders concern one connection only.
var hopHeaders = []string{"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}

// documentLimit bounds a document that is altered. That of 10,000 parts has about 1.5 MB.
const documentLimit = 8 << 20

// errGone ends a body that was stalled.
var errGone = errors.New("the request ended while it was stalled")

// exchange is one request and its answer.
type exchange struct {
	*plan
	proxy *Proxy
	w     http.ResponseWriter
	r     *http.Request
	about Request
	body  *stream // of the request

	answered bool // the answer has begun
}

// ServeHTTP implements [http.Handler]. Its panics close the connection.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	about := describe(r)
	plan, ok := p.admit(&about)
	if !ok {
		reset(r)
	}
	defer p.running.Done()
	p.counters.begin(about.Class)
	defer p.counters.end()
	x := &exchange{plan: &plan, proxy: p, w: w, r: r, about: about}
	x.body = &stream{from: r.Body, count: &p.counters.classes[about.Class].sent, stall: x.untilGone}
	x.body.edits, _ = resolve(plan.sent, r.ContentLength)
	if r.ContentLength == 0 {
		x.body.edits = nil
	}
	switch {
	case plan.stop != nil && plan.stop.when == Before:
		p.halt(plan.stop, about)
		reset(r)
	case plan.kill:
		reset(r)
	case plan.refuse != nil:
		x.answerRefusal()
	default:
		x.forward()
	}
}

// reset closes the connection of a request at once.
func reset(r *http.Request) {
	if c, ok := r.Context().Value(connKey{}).(*conn); ok {
		c.reset()
	}
	panic(http.ErrAbortHandler)
}

// abort closes the connection, after what was written of an answer.
func (x *exchange) abort() {
	if x.answered {
		_ = http.NewResponseController(x.w).Flush() // fails if the client is gone
	}
	panic(http.ErrAbortHandler)
}

// untilGone waits until the client is gone or the proxy is closed.
func (x *exchange) untilGone() error {
	var closed <-chan struct{}
	if c, ok := x.r.Context().Value(connKey{}).(*conn); ok {
		closed = c.done
	}
	select {
	case <-x.r.Context().Done():
	case <-closed:
	}
	return errGone
}

// answerRefusal answers in place of the server. A client that does not wait for a permission
// to send its body sends it first, and keeps its connection.
func (x *exchange) answerRefusal() {
	if x.r.Header.Get("Expect") == "" {
		if _, err := io.Copy(io.Discard, x.body); err != nil {
			x.abort()
		}
	}
	x.pause()
	text := fmt.Sprintf("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>Refused by a fault.</Message><RequestId>proxy-%d</RequestId></Error>", x.refuse.code, x.about.Number)
	x.fail(x.refuse.status, "application/xml", text)
}

// fail answers with a text.
func (x *exchange) fail(status int, kind, text string) {
	x.w.Header().Set("Content-Type", kind)
	x.w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	x.w.WriteHeader(status)
	if x.r.Method != http.MethodHead {
		n, _ := io.WriteString(x.w, text) // fails if the client is gone
		x.proxy.counters.classes[x.about.Class].received.Add(int64(n))
	}
}

// pause waits before the first byte of an answer.
func (x *exchange) pause() {
	d := x.proxy.shape.Load().FirstByte + x.delay
	if d <= 0 {
		return
	}
	ctx, cancel := context.WithTimeout(x.r.Context(), d)
	defer cancel()
	<-ctx.Done()
	if x.r.Context().Err() != nil {
		x.abort()
	}
}

func (x *exchange) forward() {
	request, err := x.request()
	if err != nil {
		x.fail(http.StatusBadRequest, "text/plain", "faultproxy: "+err.Error())
		return
	}
	roundTrip := x.proxy.transport.RoundTrip
	if slices.ContainsFunc(x.body.edits, func(e edit) bool { return e.do == cut || e.do == stall }) {
		roundTrip = x.direct
	}
	answer, err := roundTrip(request)
	if err != nil {
		if x.stop != nil {
			x.withhold(http.NoBody)
		}
		var network *net.OpError
		if errors.As(err, &network) && network.Op == "dial" {
			x.fail(http.StatusBadGateway, "text/plain", "faultproxy: the server does not answer: "+err.Error())
			return
		}
		x.abort()
	}
	defer answer.Body.Close()
	if x.drop || x.hang || x.stop != nil {
		x.withhold(answer.Body)
	}
	x.pause()
	x.answer(answer)
}

// request returns the request for the server.
func (x *exchange) request() (*http.Request, error) {
	to := *x.r.URL
	to.Scheme, to.Host = x.proxy.target.Scheme, x.proxy.target.Host
	out := &http.Request{
		Method: x.r.Method, URL: &to, Host: x.r.Host, Header: x.r.Header.Clone(),
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, ContentLength: x.r.ContentLength,
	}
	out = out.WithContext(x.r.Context())
	if x.r.ContentLength != 0 {
		out.Body = io.NopCloser(x.body)
	}
	for _, name := range hopHeaders {
		out.Header.Del(name)
	}
	if out.Header.Get("User-Agent") == "" {
		out.Header.Set("User-Agent", "") // the transport adds none
	}
	out.Header.Del("Content-Length") // ContentLength has it
	changed := x.alter(out.Header)
	if len(x.elements) > 0 && out.Body != nil {
		if err := x.alterDocument(out); err != nil {
			return nil, err
		}
		changed = true
	}
	if !changed || out.Header.Get("Authorization") == "" {
		return out, nil
	}
	if x.proxy.key.Access == "" {
		return nil, errors.New("a fault changes a signed request; give the proxy the clients' key in Options.Key")
	}
	return out, sigv4.Resign(out, x.proxy.key)
}

// direct sends a request whose body does not end, on a connection of its own: the server
// receives each byte before the fault, which the transport would hold in its buffer.
func (x *exchange) direct(out *http.Request) (*http.Response, error) {
	dialer := net.Dialer{Timeout: connectLimit}
	c, err := dialer.DialContext(out.Context(), "tcp", x.proxy.target.Host)
	if err != nil {
		return nil, err
	}
	out.Close = true
	context.AfterFunc(out.Context(), func() { _ = c.Close() }) // at the end of the request at the latest
	written := make(chan error, 1)
	go func() {
		err := out.Write(unbuffered{c})
		if err != nil {
			_ = c.Close()
		}
		written <- err
	}()
	answer, err := http.ReadResponse(bufio.NewReader(c), out)
	if err != nil {
		_ = c.Close()
		return nil, errors.Join(<-written, err)
	}
	return answer, nil
}

// unbuffered is a writer that net/http does not put a buffer in front of.
type unbuffered struct{ io.Writer }

// WriteByte implements [io.ByteWriter].
func (u unbuffered) WriteByte(b byte) error {
	_, err := u.Write([]byte{b})
	return err
}

// alter changes the headers of a request as planned, and reports whether any was changed.
func (x *exchange) alter(h http.Header) (changed bool) {
	for _, pattern := range x.dropped {
		prefix, all := strings.CutSuffix(strings.ToLower(pattern), "*")
		for _, name := range slices.Collect(maps.Keys(h)) {
			lower := strings.ToLower(name)
			if lower == prefix || all && strings.HasPrefix(lower, prefix) {
				h.Del(name)
				changed = true
			}
		}
	}
	if moved := moveRange(h.Get("Range"), "bytes=", x.shift); moved != "" {
		h.Set("Range", moved)
		changed = true
	}
	return changed
}

// alterDocument removes elements from the body of a request.
func (x *exchange) alterDocument(out *http.Request) error {
	text, err := io.ReadAll(io.LimitReader(x.body, documentLimit+1))
	if err != nil {
		return fmt.Errorf("read a document: %w", err)
	}
	if len(text) > documentLimit {
		return fmt.Errorf("a fault removes elements of a body of more than %d bytes; restrict it to requests with a document", documentLimit)
	}
	for _, name := range x.elements {
		name = regexp.QuoteMeta(name)
		text = regexp.MustCompile("<"+name+">[^<]*</"+name+">").ReplaceAll(text, nil)
	}
	out.Body, out.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
	out.Header.Del("Content-Md5")
	if hash := out.Header.Get("X-Amz-Content-Sha256"); hash != "" && hash != sigv4.Unsigned {
		out.Header.Set("X-Amz-Content-Sha256", sigv4.Hash(text))
	}
	return nil
}

// withhold never sends the answer. It reads all of it: the server has acted.
func (x *exchange) withhold(body io.Reader) {
	_, _ = io.Copy(io.Discard, body) // however it ends
	switch {
	case x.stop != nil:
		x.proxy.halt(x.stop, x.about)
		reset(x.r)
	case x.hang:
		_ = x.untilGone()
	}
	panic(http.ErrAbortHandler)
}

// answer sends the server's answer to the client.
func (x *exchange) answer(from *http.Response) {
	head := x.w.Header()
	maps.Copy(head, from.Header)
	for _, name := range hopHeaders {
		head.Del(name)
	}
	if len(head.Values("Content-Type")) == 0 {
		head["Content-Type"] = nil // or the server of this proxy guesses it
	}
	if x.etag != "" && head.Get("Etag") != "" {
		head.Set("Etag", x.etag)
	}
	if moved := moveRange(head.Get("Content-Range"), "bytes ", -x.shift); moved != "" {
		head.Set("Content-Range", moved)
	}
	size := from.ContentLength
	body := &stream{from: from.Body, count: new(atomic.Int64), stall: x.stalled}
	if x.r.Method != http.MethodHead && size != 0 {
		if body.edits, size = resolve(x.received, size); size >= 0 {
			head.Set("Content-Length", strconv.FormatInt(size, 10))
		}
	}
	x.w.WriteHeader(from.StatusCode)
	x.answered = true
	x.copy(body)
}

// stalled sends what was written, and waits.
func (x *exchange) stalled() error {
	_ = http.NewResponseController(x.w).Flush() // fails if the client is gone
	return x.untilGone()
}

// copy sends a body to the client.
func (x *exchange) copy(body io.Reader) {
	buffer := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buffer)
	count := &x.proxy.counters.classes[x.about.Class].received
	for {
		n, err := body.Read(buffer[:])
		if n > 0 {
			written, failed := x.w.Write(buffer[:n])
			count.Add(int64(written))
			if failed != nil {
				x.abort()
			}
		}
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			x.abort()
		}
	}
}

// moveRange returns a range, such as "bytes=4-7" or "bytes 4-7/100", moved by a number of
// bytes. It returns "" if there is nothing to move.
func moveRange(text, unit string, shift int64) string {
	rest, ok := strings.CutPrefix(text, unit)
	first, last, found := strings.Cut(rest, "-")
	if !ok || !found || first == "" || shift == 0 {
		return ""
	}
	last, total, _ := strings.Cut(last, "/")
	moved := unit
	for i, part := range []string{first, last} {
		n, err := strconv.ParseInt(part, 10, 64)
		switch {
		case err == nil:
			moved += strconv.FormatInt(max(0, n+shift), 10)
		case part != "":
			return ""
		}
		if i == 0 {
			moved += "-"
		}
	}
	if total != "" {
		moved += "/" + total
	}
	return moved
}
