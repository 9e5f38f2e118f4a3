package jetlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// msgGet asks a stream's leader for one message. Direct gets are answered by
// any replica, which may not have seen the last append yet.
type msgGet struct {
	Seq     uint64 `json:"seq,omitempty"`
	LastFor string `json:"last_by_subj,omitempty"`
	NextFor string `json:"next_by_subj,omitempty"`
}

// stored is a message as a stream keeps it.
type stored struct {
	Subject string    `json:"subject"`
	Seq     uint64    `json:"seq"`
	Headers []byte    `json:"hdrs"`
	Data    []byte    `json:"data"`
	Time    time.Time `json:"time"`
}

func (m stored) header() (nats.Header, error) {
	if len(m.Headers) == 0 {
		return nil, nil
	}
	return nats.DecodeHeadersMsg(m.Headers)
}

// readable is what can be read of the headers: nothing where they are none, as the
// client library delivers such a message too.
func (m stored) readable() nats.Header {
	h, err := m.header()
	if err != nil {
		return nil
	}
	return h
}

// errNoMessage: the stream has no such message.
var errNoMessage = errors.New("no such message")

// getStored asks once.
func (l *Log) getStored(ctx context.Context, stream string, q msgGet) (stored, error) {
	bad := func(err error) (stored, error) {
		return stored{}, fmt.Errorf("read a message of stream %s: %w", stream, err)
	}
	request, err := json.Marshal(q)
	if err != nil {
		return bad(err)
	}
	reply, err := l.nc.RequestWithContext(ctx, "$JS.API.STREAM.MSG.GET."+stream, request)
	if err != nil {
		return bad(err)
	}
	var r struct {
		Error   *jetstream.APIError `json:"error"`
		Message *stored             `json:"message"`
	}
	if err := json.Unmarshal(reply.Data, &r); err != nil {
		return bad(err)
	}
	switch {
	case r.Error != nil && r.Error.ErrorCode == codeNoMessage:
		return bad(errNoMessage)
	case r.Error != nil:
		return bad(r.Error)
	case r.Message == nil:
		return bad(errors.New("the reply holds none"))
	}
	return *r.Message, nil
}

// get asks once for an event of the log.
func (l *Log) get(ctx context.Context, q msgGet) (events.Recorded, error) {
	m, err := l.fetch(ctx, q)
	if err != nil {
		return events.Recorded{}, err
	}
	return recorded(m.Subject, m.readable(), m.Data, m.Seq, m.Time), nil
}

// At is the event at a sequence. It is [ErrEnd] when the log ends before it,
// and [ErrGap] when it is missing.
func (l *Log) At(ctx context.Context, seq uint64) (events.Recorded, error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	var found events.Recorded
	err := l.retry(ctx, func(ctx context.Context) (err error) {
		if err = l.known(ctx); err == nil {
			found, err = l.get(ctx, msgGet{Seq: seq})
		}
		return err
	})
	if errors.Is(err, errNoMessage) {
		last, lerr := l.Last(ctx)
		switch {
		case lerr != nil:
			err = lerr
		case last < seq:
			err = fmt.Errorf("%w: it has %d events", ErrEnd, last)
		default:
			err = fmt.Errorf("%w: it is not there, although the log has %d events", ErrGap, last)
		}
	}
	if err != nil {
		return events.Recorded{}, fmt.Errorf("read event %d of the log at %s: %w", seq, l.opts.where(), err)
	}
	return found, nil
}
