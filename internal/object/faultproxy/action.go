package faultproxy

import (
	"net/http"
	"time"
)

// Action is what happens to the requests of a [Fault]. Offsets count the bytes of a body. A
// negative one counts from the end, and one past the end is that of the last byte.
type Action func(*plan)

// plan is what happens to one request.
type plan struct {
	refuse   *refusal
	kill     bool
	drop     bool // the answer
	hang     bool
	stop     *stop
	delay    time.Duration
	dropped  []string // request headers
	elements []string // of the XML document of a request, removed
	shift    int64    // of the range
	etag     string   // of the answer
	sent     []edit
	received []edit
}

// refusal is an answer that does not come from the server.
type refusal struct {
	status int
	code   string
}

// stop is a point from which no request reaches the server.
type stop struct {
	when When
	then func(Request)
}

// When is a moment of a request.
type When int

// The moments.
const (
	Before When = iota // before the server receives the request
	After              // after the server has answered
)

// Refuse answers with a status and an error document with an S3 error code. The server does
// not receive the request. The status 200 makes it an error that a client sees only if it
// reads the document.
func Refuse(status int, code string) Action {
	return func(p *plan) { p.refuse = &refusal{status, code} }
}

// SlowDown answers 503 with the code SlowDown.
func SlowDown() Action { return Refuse(http.StatusServiceUnavailable, "SlowDown") }

// Kill resets the connection. The server does not receive the request.
func Kill() Action { return func(p *plan) { p.kill = true } }

// DropAnswer closes the connection after the server has answered. The client receives
// nothing.
func DropAnswer() Action { return func(p *plan) { p.drop = true } }

// Hang keeps the answer until the client gives up or the proxy is closed.
func Hang() Action { return func(p *plan) { p.hang = true } }

// Delay delays the answer.
func Delay(d time.Duration) Action { return func(p *plan) { p.delay += d } }

// Stop makes the request the last that reaches the server, or with [Before] the first that
// does not. All connections are closed, and later requests meet a closed connection until
// [Proxy.Resume]. then, which may be nil, is called once that is so, such as to kill the
// client.
func Stop(when When, then func(Request)) Action {
	return func(p *plan) { p.stop = &stop{when, then} }
}

// DropHeaders removes headers on their way to the server, as if it did not know them. A
// name that ends in * stands for all names with that beginning.
func DropHeaders(names ...string) Action {
	return func(p *plan) { p.dropped = append(p.dropped, names...) }
}

// DropElements removes elements from the XML document of a request on its way to the server.
// The end of a multipart upload has checksums in ChecksumCRC32C, which a server that did not
// see the headers of the parts refuses.
func DropElements(names ...string) Action {
	return func(p *plan) { p.elements = append(p.elements, names...) }
}

// WrongRange moves the range of a request by a number of bytes. The answer still has the
// offsets that the client asked for. A request without a range passes unchanged.
func WrongRange(shift int64) Action { return func(p *plan) { p.shift += shift } }

// WrongETag answers with the ETag of another object.
func WrongETag() Action {
	return func(p *plan) { p.etag = `"0ddba11c0ffee0ddba11c0ffee0ddba1"` }
}

// FlipSent flips a bit of a request's body.
func FlipSent(at int64) Action { return sent(flip, at) }

// CutSent closes both connections in the middle of a request's body. The server receives
// the bytes before the offset.
func CutSent(at int64) Action { return sent(cut, at) }

// StallSent reads a request's body up to an offset, and no further. It ends when the
// proxy is closed, or by [Proxy.Disconnect].
func StallSent(at int64) Action { return sent(stall, at) }

// FlipReceived flips a bit of the body of an answer.
func FlipReceived(at int64) Action { return received(flip, at) }

// CutReceived closes the connection in the middle of the body of an answer. The client
// receives the bytes before the offset.
func CutReceived(at int64) Action { return received(cut, at) }

// StallReceived sends the body of an answer up to an offset, and no further, until the client
// gives up or the proxy is closed.
func StallReceived(at int64) Action { return received(stall, at) }

// AddByte adds a byte before an offset of the body of an answer, whose declared length
// includes it.
func AddByte(at int64) Action { return received(insert, at) }

// Shorten removes the last n bytes of the body of an answer. Its declared length does not
// include them.
func Shorten(n int64) Action { return received(end, -n) }

func sent(do kind, at int64) Action {
	return func(p *plan) { p.sent = append(p.sent, edit{do, at}) }
}

func received(do kind, at int64) Action {
	return func(p *plan) { p.received = append(p.received, edit{do, at}) }
}
