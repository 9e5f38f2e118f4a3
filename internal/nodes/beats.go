package nodes

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// interval is the time between two beats.
func (l *Link) interval() time.Duration { return l.timeout / 10 }

// soon bounds a request that is answered at once.
func (l *Link) soon() time.Duration { return max(2*l.interval(), time.Second) }

// request sends a control request and decodes its answer.
func request[Out any](ctx context.Context, l *Link, c *connections, timeout time.Duration, path string, in any) (Out, error) {
	as, moves := l.credential()
	return requestAs[Out](ctx, l, c, as, moves, timeout, path, in)
}

// requestAs is request with what [Link.credential] returned when the request was made up.
func requestAs[Out any](ctx context.Context, l *Link, c *connections, as credential, moves int, timeout time.Duration, path string, in any) (Out, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	defer context.AfterFunc(l.ctx, cancel)()
	out, _, err := call[Out](ctx, c, as, http.MethodPost, l.base+path, in, batchBody)
	if l.moved(moves) {
		return out, errMoved
	}
	return out, err
}

// errMoved reports a request to an endpoint that another one has replaced meanwhile.
var errMoved = errors.New("another endpoint has taken the place of this one")

// final ends the link if an error shows that no request will succeed any more.
func (l *Link) final(err error) bool {
	refused := &refusal{}
	switch {
	case errors.Is(err, errMoved):
		return false
	case errors.Is(err, errOther):
		l.end(fmt.Errorf("%w: %s", ErrRestarted, l.Endpoint()))
	case !errors.As(err, &refused):
		return false
	case refused.Kind == problem.Gone:
		l.end(fmt.Errorf("%w: %s", ErrExpelled, refused.Detail))
	case refused.Kind == problem.Failed:
		l.end(fmt.Errorf("%w: %s", ErrExcluded, refused.Detail))
	case refused.Kind == problem.Unauthorized:
		l.end(fmt.Errorf("%w: %s", ErrRestarted, refused.Detail))
	default:
		return false
	}
	return true
}

// beat sends a beat each T/10. A beat that is not answered within two intervals is
// repeated at once on a new connection.
func (l *Link) beat() {
	timer := time.NewTimer(l.interval())
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-l.hurry:
		case <-l.ctx.Done():
			return
		}
		l.mu.Lock()
		port := l.port
		l.mu.Unlock()
		sent := time.Now()
		_, err := request[nothing](l.ctx, l, l.beats, 2*l.interval(), "/v1/beat", beatRequest{port})
		if l.ctx.Err() != nil || l.final(err) {
			return
		}
		wait := l.interval()
		switch {
		case err == nil:
			l.hear(sent)
		case errors.Is(err, errMoved):
		default:
			l.beats.drop()
			l.c.Logger.Debug("beat failed", "endpoint", l.Endpoint(), "err", err)
		}
		// Measured from the start of this beat, so that an attempt that took long is
		// repeated at once, and a refused connection is not tried in a loop.
		timer.Reset(max(0, wait-time.Since(sent)))
	}
}

// hear notes an answered beat.
func (l *Link) hear(sent time.Time) {
	l.mu.Lock()
	// If this process did not run, the watch may not have noticed the silence.
	l.expire(time.Now())
	l.answered = sent
	if l.quiet && time.Since(sent) < l.timeout/2 {
		l.quiet, l.silent = false, make(chan struct{})
		close(l.contact)
		l.c.Logger.Info("contact with coordinator restored", "endpoint", l.at)
	}
	l.mu.Unlock()
	if l.c.Answered != nil {
		l.c.Answered(sent, l.timeout)
	}
}

// expire closes silent if T/2 has passed. Its caller holds l.mu. It returns how long until
// then.
func (l *Link) expire(now time.Time) time.Duration {
	left := l.answered.Add(l.timeout / 2).Sub(now)
	if left <= 0 && !l.quiet {
		l.quiet, l.contact = true, make(chan struct{})
		close(l.silent)
		l.c.Logger.Warn("no contact with coordinator", "endpoint", l.at, "for", now.Sub(l.answered))
	}
	return left
}

// watch closes silent in time, whatever the beats wait for, and ends the link after Wait.
func (l *Link) watch() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-l.ctx.Done():
			return
		}
		now := time.Now()
		l.mu.Lock()
		left := l.expire(now)
		silence := now.Sub(l.answered)
		l.mu.Unlock()
		if silence >= l.c.Wait {
			l.end(fmt.Errorf("%w at %s for %v; start the job again when the coordinator's node is back", ErrNoContact, l.Endpoint(), silence.Round(time.Second)))
			return
		}
		if left <= 0 {
			left = min(l.interval(), l.c.Wait-silence)
		}
		timer.Reset(left)
	}
}

// Silent returns a channel that is closed when T/2 has passed since the last answered
// beat was sent: the caller kills its group then. After [Link.Contact] a new call returns
// a new channel.
func (l *Link) Silent() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expire(time.Now()) // the watch may be late
	return l.silent
}

// Contact returns a channel that is closed while beats are answered. During silence it is
// open, and the next answered beat closes it.
func (l *Link) Contact() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.contact
}

// poll asks for commands until the link ends.
func (l *Link) poll() {
	after, moves := uint64(0), 0
	for l.ctx.Err() == nil {
		as, now := l.credential()
		if now != moves {
			after, moves = 0, now // the new endpoint numbers its commands from 1
		}
		out, err := requestAs[nextAnswer](l.ctx, l, l.rest, as, moves, longPoll+l.soon(), "/v1/next", nextRequest{after})
		if err != nil {
			if l.final(err) || pauseFor(l.ctx, l.interval()) != nil {
				return
			}
			continue
		}
		for i, command := range out.Commands {
			if number := out.First + uint64(i); number > after {
				after = number
				l.commands.put(command)
			}
		}
		if out.Ended != nil && !l.decide(&EndedError{out.Ended.Reason, out.Ended.Code}) {
			return
		}
		if out.Ended != nil {
			// It only shortens the coordinator's wait, which may end before the answer is sent.
			_, _ = request[nothing](l.ctx, l, l.rest, l.soon(), "/v1/leave", leaveRequest{"the job has ended"})
			l.stop()
			return
		}
	}
}

// send sends messages until the link ends.
func (l *Link) send() {
	for {
		l.mu.Lock()
		in := tellRequest{First: l.first, Messages: batch(l.told, func(m message) int { return len(m.Body) }), Port: l.port}
		as, moves := l.as, l.moves
		l.mu.Unlock()
		if len(in.Messages) == 0 {
			select {
			case <-l.push:
			case <-l.ctx.Done():
				return
			}
			continue
		}
		out, err := requestAs[tellAnswer](l.ctx, l, l.rest, as, moves, l.soon()+slowRequest, "/v1/tell", in)
		if err != nil {
			if l.final(err) || pauseFor(l.ctx, l.interval()) != nil {
				return
			}
			continue
		}
		l.mu.Lock()
		if l.moves != moves {
			l.mu.Unlock()
			continue
		}
		for len(l.told) > 0 && l.first <= out.Heard {
			l.told, l.first = l.told[1:], l.first+1
		}
		close(l.flushed)
		l.flushed = make(chan struct{})
		l.mu.Unlock()
	}
}
