package front

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// The only requests that clients make of the server. A body is parsed into one of
// the types below, which have no other members, and encoded again.

type infoRequest struct {
	Filter string `json:"subjects_filter,omitempty"`
	Offset int    `json:"offset,omitempty"`
}

type namesRequest struct {
	Subject string `json:"subject,omitempty"`
	Offset  int    `json:"offset,omitempty"`
}

type getRequest struct {
	Seq     uint64 `json:"seq,omitempty"`
	LastFor string `json:"last_by_subj,omitempty"`
	NextFor string `json:"next_by_subj,omitempty"`
}

type createRequest struct {
	Stream string         `json:"stream_name"`
	Config consumerConfig `json:"config"`
	Action string         `json:"action"`
}

// consumerConfig configures a pull consumer, which the server forgets soon after
// its use.
type consumerConfig struct {
	Name      string        `json:"name"`
	Policy    string        `json:"deliver_policy"`
	From      uint64        `json:"opt_start_seq,omitempty"`
	Ack       string        `json:"ack_policy"`
	Filter    string        `json:"filter_subject,omitempty"`
	Replay    string        `json:"replay_policy"`
	Threshold time.Duration `json:"inactive_threshold,omitempty"`
	Replicas  int           `json:"num_replicas"`
	Memory    bool          `json:"mem_storage,omitempty"`
}

type nextRequest struct {
	Expires   time.Duration `json:"expires,omitempty"`
	Batch     int           `json:"batch,omitempty"`
	MaxBytes  int           `json:"max_bytes,omitempty"`
	NoWait    bool          `json:"no_wait,omitempty"`
	Heartbeat time.Duration `json:"idle_heartbeat,omitempty"`
}

const (
	mostThreshold = 5 * time.Minute
	mostExpires   = 5 * time.Minute
	mostPulled    = 1 << 16
	longConsumer  = 64
)

// consumer is a consumer that a session has made.
type consumer struct {
	stream string
	until  time.Time // when the server has forgotten it, if unused
	keeps  time.Duration
}

// parse parses the body of a request; no body is an empty request.
func parse[T any](body []byte) (request T, err error) {
	if len(body) == 0 {
		return request, nil
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&request); err != nil {
		return request, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return request, errors.New("something follows the request")
	}
	return request, nil
}

// request passes on a request that reads the log or an entry.
func (s *session) request(f frame, h header) error {
	body, ok, why := []byte(nil), false, (*Refusal)(nil)
	verb := strings.TrimPrefix(f.subject, api)
	if h == nil {
		if name, is := strings.CutPrefix(verb, "CONSUMER."); is {
			body, ok, why = s.consumerRequest(name, f.payload)
		} else {
			body, ok = s.streamRequest(verb, f.payload)
		}
	}
	switch {
	case why != nil:
		return s.answer(f.reply, why.answer())
	case !ok:
		return s.deny(f.subject, f.reply)
	case bounded(f.subject):
		if err := s.ask(f.reply); err != nil {
			return s.refuse(f, refusal(err))
		}
	}
	return s.pass(f.subject, f.reply, nil, body)
}

// encoded returns the body of a request as it is passed on.
func encoded(request any, ok bool) ([]byte, bool) {
	body, err := json.Marshal(request)
	return body, ok && err == nil
}

// streamRequest checks a request about a stream.
func (s *session) streamRequest(verb string, payload []byte) ([]byte, bool) {
	switch {
	case verb == "STREAM.NAMES":
		r, err := parse[namesRequest](payload)
		return encoded(r, err == nil && r.Subject == events.Filter)
	case strings.HasPrefix(verb, "STREAM.INFO."):
		r, err := parse[infoRequest](payload)
		ok := err == nil && s.readable(strings.TrimPrefix(verb, "STREAM.INFO.")) && (r.Filter == "" || pattern(r.Filter))
		if len(payload) == 0 {
			return nil, ok
		}
		return encoded(r, ok)
	case strings.HasPrefix(verb, "STREAM.MSG.GET."):
		r, err := parse[getRequest](payload)
		return encoded(r, err == nil && s.readable(strings.TrimPrefix(verb, "STREAM.MSG.GET.")))
	case strings.HasPrefix(verb, "DIRECT.GET."):
		stream, subject, last := strings.Cut(strings.TrimPrefix(verb, "DIRECT.GET."), ".")
		if last {
			return nil, s.readable(stream) && subject != "" && len(payload) == 0
		}
		r, err := parse[getRequest](payload)
		return encoded(r, err == nil && s.readable(stream))
	}
	return nil, false
}

// readable reports whether clients may read a stream: one of the log, or a
// bucket.
func (s *session) readable(stream string) bool {
	bucket, is := strings.CutPrefix(stream, "KV_")
	return s.f.o.Log.Tail(stream) || is && !s.judge.grant.LogAlone && contains(s.f.o.Buckets, bucket)
}

// consumerRequest checks a request about a consumer that the session has made, or
// makes.
func (s *session) consumerRequest(verb string, payload []byte) (body []byte, ok bool, why *Refusal) {
	if rest, is := strings.CutPrefix(verb, "CREATE."); is {
		return s.create(rest, payload)
	}
	for _, what := range []string{"MSG.NEXT.", "DELETE.", "INFO."} {
		rest, is := strings.CutPrefix(verb, what)
		if !is {
			continue
		}
		stream, name, _ := strings.Cut(rest, ".")
		c := s.consumers[name]
		if c == nil || c.stream != stream {
			if !s.f.o.Log.Tail(stream) || strings.Contains(name, ".") {
				return nil, false, nil
			}
			return nil, false, &Refusal{Code: codeNoConsumer, Status: 404, Text: "consumer not found"}
		}
		switch what {
		case "MSG.NEXT.":
			r, err := parse[nextRequest](payload)
			ok := err == nil && r.Batch >= 0 && r.Batch <= mostPulled && r.Expires >= 0 && r.Expires <= mostExpires && r.MaxBytes >= 0 && r.Heartbeat >= 0
			if ok {
				c.until = time.Now().Add(r.Expires + c.keeps)
			}
			body, ok = encoded(r, ok)
			return body, ok, nil
		case "DELETE.":
			s.forgetConsumer(name)
		}
		return nil, len(payload) == 0, nil
	}
	return nil, false, nil
}

// create checks the creation of a consumer: CREATE.<stream>.<name>[.<filter>].
func (s *session) create(rest string, payload []byte) ([]byte, bool, *Refusal) {
	stream, rest, _ := strings.Cut(rest, ".")
	name, filter, _ := strings.Cut(rest, ".")
	r, err := parse[createRequest](payload)
	c := r.Config
	if err != nil || !s.f.o.Log.Tail(stream) || r.Stream != stream || r.Action != "create" ||
		c.Name != name || name == "" || len(name) > longConsumer || !headerName(name) ||
		c.Filter != filter || filter != "" && (!strings.HasPrefix(filter, eventSubjects) || !pattern(filter)) ||
		c.Policy != "by_start_sequence" || c.Ack != "none" || c.Replay != "instant" ||
		!c.Memory || c.Replicas < 0 || c.Replicas > 1 || c.Threshold <= 0 || c.Threshold > mostThreshold {
		return nil, false, nil
	}
	now := time.Now()
	for old, c := range s.consumers {
		if now.After(c.until) {
			s.forgetConsumer(old)
		}
	}
	if len(s.consumers) >= s.f.limits.Consumers && s.consumers[name] == nil {
		return nil, false, &Refusal{Code: CodeBusy, Status: 503, Text: "this client reads the log in too many ways at the same time: maximum consumers limit reached"}
	}
	s.f.mu.Lock()
	other := s.f.consumers[name]
	if other == nil {
		s.f.consumers[name] = s
	}
	s.f.mu.Unlock()
	if other != nil && other != s {
		return nil, false, nil // its name is a secret of another session
	}
	s.consumers[name] = &consumer{stream: stream, keeps: c.Threshold, until: now.Add(c.Threshold + mostExpires)}
	body, ok := encoded(r, true)
	return body, ok, nil
}

// forgetConsumer removes a consumer from the session.
func (s *session) forgetConsumer(name string) {
	delete(s.consumers, name)
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	if s.f.consumers[name] == s {
		delete(s.f.consumers, name)
	}
}

// forget removes the consumers of a session that has ended.
func (s *session) forget() {
	for name, c := range s.consumers {
		s.f.o.Log.Forget(c.stream, name)
	}
}
