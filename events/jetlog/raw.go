package jetlog

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/archive"
	"github.com/nats-io/nats.go/jetstream"
)

// rawBatch is the number of messages per request of [Log.Raw]. The server sends them
// all at once, and closes a connection with more than 64 MiB waiting; a message has at
// most 1 MiB.
const rawBatch = 48

// Raw yields the messages of the live stream from sequence from to until as the server
// stores them. The client library parses headers and forgets how they were written. Raw
// therefore speaks the protocol itself, over a separate connection:
//
//	C: SUB inbox 1
//	C: PUB $JS.API.CONSUMER.MSG.NEXT.CKPT.x inbox 25   {"batch":48, …}
//	S: HMSG ckpt.a.main.s.group.started 1 $JS.ACK.CKPT.x.1.65537.1.<time>.<left> 388 512
//
// Raw is for processes that have the server or reach the owner's socket; it needs a
// dialer and no token. It ends with an error at the first missing message, does not
// retry, and does not outlive its connection: the caller starts again.
func (l *Log) Raw(ctx context.Context, from, until uint64) iter.Seq2[archive.Message, error] {
	return func(yield func(archive.Message, error) bool) {
		err := l.raw(ctx, from, until, func(m archive.Message) bool { return yield(m, nil) })
		if err != nil {
			yield(archive.Message{}, fmt.Errorf("read the stream of the log at %s in stored form: %w", l.opts.where(), err))
		}
	}
}

func (l *Log) raw(ctx context.Context, from, until uint64, yield func(archive.Message) bool) (err error) {
	if l.opts.Dial == nil {
		return errors.New("the server is not in this process")
	}
	if from > until {
		return nil
	}
	once, cancel := context.WithTimeout(ctx, l.opts.Timeout)
	defer cancel()
	if err := l.known(once); err != nil {
		return err
	}
	if sealed := l.sealed().Last; from <= sealed {
		return fmt.Errorf("event %d has moved to the archive, which ends at %d: %w", from, sealed, errAgain)
	}
	conn, err := l.opts.Dial(once)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	w := &wire{conn: conn, in: bufio.NewReaderSize(conn, 1<<18), limit: l.opts.Timeout}
	if err := w.greet(); err != nil {
		return err
	}
	consumer := l.stream() + "." + rand.Text()
	if err := w.consume(consumer, from); err != nil {
		return fmt.Errorf("consumer: %w", err)
	}
	defer func() { _ = w.ask("$JS.API.CONSUMER.DELETE."+consumer, "") }() // the server drops it by itself, later
	next := "$JS.API.CONSUMER.MSG.NEXT." + consumer
	for from <= until {
		batch := min(until-from+1, rawBatch)
		if err := w.ask(next, fmt.Sprintf(`{"batch":%d,"expires":%d}`, batch, l.opts.Timeout.Nanoseconds())); err != nil {
			return err
		}
		for range batch {
			m, err := w.message()
			if err != nil {
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				return fmt.Errorf("event %d: %w", from, err)
			}
			if m.Sequence != from {
				return fmt.Errorf("%w: event %d is followed by event %d; %s", ErrGap, from-1, m.Sequence, restore)
			}
			if !yield(m) {
				return nil
			}
			from++
		}
	}
	return nil
}

// wire is a connection that speaks the NATS protocol.
type wire struct {
	conn  net.Conn
	in    *bufio.Reader
	limit time.Duration // of each wait
	to    string        // the inbox
}

func (w *wire) line() (string, error) {
	if err := w.conn.SetReadDeadline(time.Now().Add(w.limit)); err != nil {
		return "", err
	}
	for {
		line, err := w.in.ReadString('\n')
		if err != nil {
			return "", err
		}
		line = strings.TrimRight(line, "\r\n")
		switch {
		case line == "PING":
			if err := w.send("PONG\r\n"); err != nil {
				return "", err
			}
		case strings.HasPrefix(line, "-ERR"):
			return "", fmt.Errorf("the server replied %s", line)
		case strings.HasPrefix(line, "INFO ") || line == "+OK":
		default:
			return line, nil
		}
	}
}

func (w *wire) send(text string) error {
	if err := w.conn.SetWriteDeadline(time.Now().Add(w.limit)); err != nil {
		return err
	}
	_, err := io.WriteString(w.conn, text)
	return err
}

// greet introduces the client, and waits until the server has processed all of it.
func (w *wire) greet() error {
	if err := w.conn.SetReadDeadline(time.Now().Add(w.limit)); err != nil {
		return err
	}
	if _, err := w.in.ReadString('\n'); err != nil { // INFO
		return err
	}
	w.to = "_INBOX." + rand.Text() + ".raw"
	if err := w.send(`CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true,"protocol":1,"lang":"go","version":"1","name":"ckptstore raw"}` + "\r\n" +
		"SUB " + w.to + " 1\r\nPING\r\n"); err != nil {
		return err
	}
	line, err := w.line()
	if err == nil && line != "PONG" {
		err = fmt.Errorf("the server replied %q", line)
	}
	return err
}

// consume creates a consumer, STREAM.NAME, of the events from a sequence on. Only this
// connection can use it: the owner's front refuses others.
func (w *wire) consume(consumer string, from uint64) error {
	stream, name, _ := strings.Cut(consumer, ".")
	body, err := json.Marshal(struct {
		Stream string                   `json:"stream_name"`
		Config jetstream.ConsumerConfig `json:"config"`
		Action string                   `json:"action"`
	}{stream, jetstream.ConsumerConfig{
		Name: name, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: from,
		AckPolicy: jetstream.AckNonePolicy, ReplayPolicy: jetstream.ReplayInstantPolicy,
		InactiveThreshold: time.Minute, MemoryStorage: true, Replicas: 1,
	}, "create"})
	if err != nil {
		return err
	}
	if err := w.ask("$JS.API.CONSUMER.CREATE."+consumer, string(body)); err != nil {
		return err
	}
	line, err := w.line()
	if err != nil {
		return err
	}
	f := strings.Fields(line)
	if len(f) != 4 || f[0] != "MSG" {
		return fmt.Errorf("the server replied %q", line)
	}
	n, err := strconv.Atoi(f[3])
	if err != nil || n < 0 || n > MaxMessage {
		return fmt.Errorf("the server replied %q", line)
	}
	text := make([]byte, n+2)
	if _, err := io.ReadFull(w.in, text); err != nil {
		return err
	}
	var reply struct {
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(text[:n], &reply); err != nil {
		return err
	}
	if reply.Error != nil {
		return reply.Error
	}
	return nil
}

// ask sends a request whose answers come to the inbox.
func (w *wire) ask(subject, body string) error {
	return w.send("PUB " + subject + " " + w.to + " " + strconv.Itoa(len(body)) + "\r\n" + body + "\r\n")
}

// message reads the next message of a stream.
func (w *wire) message() (m archive.Message, err error) {
	line, err := w.line()
	if err != nil {
		return m, err
	}
	f := strings.Fields(line)
	var sizes []string
	switch {
	case len(f) == 6 && f[0] == "HMSG":
		sizes = f[4:]
	case len(f) == 5 && f[0] == "HMSG": // a status: it has no subject to answer to
		sizes = f[3:]
	case len(f) == 5 && f[0] == "MSG":
		sizes = []string{"0", f[4]}
	default:
		return m, fmt.Errorf("the server replied %q", line)
	}
	heads, err1 := strconv.Atoi(sizes[0])
	total, err2 := strconv.Atoi(sizes[1])
	if err := errors.Join(err1, err2); err != nil || heads > total || total > 4*MaxMessage {
		return m, fmt.Errorf("the server replied %q", line)
	}
	data := make([]byte, total+2)
	if _, err := io.ReadFull(w.in, data); err != nil {
		return m, err
	}
	if len(f) == 5 && f[0] == "HMSG" {
		status, _, _ := strings.Cut(string(data), "\r\n")
		return m, fmt.Errorf("the server ends the delivery: %s", status)
	}
	if m.Sequence, m.Time, err = ackSubject(f[3]); err != nil {
		return m, err
	}
	m.Subject, m.Data = f[1], data[heads:total:total]
	if heads > 0 {
		m.Header = data[:heads:heads]
	}
	return m, nil
}

// ackSubject parses the sequence and the time of a message from its acknowledgement
// subject: $JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<consumer
// sequence>.<time>.<left>. Newer servers put a domain and an account before the stream,
// and append a token.
func ackSubject(subject string) (sequence uint64, at time.Time, err error) {
	f := strings.Split(subject, ".")
	first := 5
	if len(f) >= 11 {
		first = 7
	}
	if len(f) < first+4 || f[0] != "$JS" || f[1] != "ACK" {
		return 0, at, fmt.Errorf("the server sent something other than a message of a stream: %q", subject)
	}
	sequence, err1 := strconv.ParseUint(f[first], 10, 64)
	nanos, err2 := strconv.ParseInt(f[first+2], 10, 64)
	return sequence, time.Unix(0, nanos).UTC(), errors.Join(err1, err2)
}
