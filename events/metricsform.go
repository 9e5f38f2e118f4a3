package events

import "errors"

// CheckBody returns the reason why the body does not fit its kind, as [Event.Body]
// would, without building the body.
func (e Event) CheckBody() error {
	if e.Kind == (Metrics{}).Kind() && e.Version == 1 && plainMetrics(e.Data) {
		return nil
	}
	body, err := e.Body()
	if v, ok := body.(*Void); ok {
		return errors.New(v.Why)
	}
	return err
}

// plainMetrics reports whether body is a report.metrics body as [NewFact] writes it,
// with scalar values only. Most events of any log are of this form. False proves
// nothing about the body. encoding/json takes ten times as long for the same answer,
// which was most of the owner's time for a client's event.
func plainMetrics(body []byte) bool {
	s := scanner{body}
	return s.text(`{"attempt":`) && s.integer() &&
		s.text(`,"iteration":`) && s.integer() &&
		s.text(`,"step":`) && s.integer() &&
		s.text(`,"metrics":{`) && s.members() &&
		s.others() &&
		s.text(`,"time_this_iter_s":`) && s.number() &&
		s.slowest() &&
		s.text(`}`) && len(s.rest) == 0
}

// scanner consumes known parts from the front of a JSON text. After any method except
// text has returned false, the rest is meaningless.
type scanner struct{ rest []byte }

func (s *scanner) text(want string) bool {
	if len(s.rest) < len(want) || string(s.rest[:len(want)]) != want {
		return false
	}
	s.rest = s.rest[len(want):]
	return true
}

// slowest consumes the last rank to report, if present.
func (s *scanner) slowest() bool {
	return !s.text(`,"slowest":{"rank":`) || s.integer() && s.text(`,"late_s":`) && s.number() && s.text(`}`)
}

// others consumes the reports of other ranks, if present.
func (s *scanner) others() bool {
	if !s.text(`,"others":[`) {
		return true
	}
	for {
		if !s.text(`{"rank":`) || !s.integer() || !s.text(`,"metrics":{`) || !s.members() || !s.text(`}`) {
			return false
		}
		if s.text(`]`) {
			return true
		}
		if !s.text(`,`) {
			return false
		}
	}
}

// members consumes the members of an object and its end.
func (s *scanner) members() bool {
	if s.text(`}`) {
		return true
	}
	for {
		if !s.plainString() || !s.text(`:`) || !s.value() {
			return false
		}
		if s.text(`}`) {
			return true
		}
		if !s.text(`,`) {
			return false
		}
	}
}

// value consumes a scalar value.
func (s *scanner) value() bool {
	if s.text(`true`) || s.text(`false`) || s.text(`null`) {
		return true
	}
	if len(s.rest) > 0 && s.rest[0] == '"' {
		return s.plainString()
	}
	return s.number()
}

// plainString consumes a string of printable ASCII without escapes.
func (s *scanner) plainString() bool {
	if !s.text(`"`) {
		return false
	}
	for i, c := range s.rest {
		switch {
		case c == '"':
			s.rest = s.rest[i+1:]
			return true
		case c < ' ' || c > '~' || c == '\\':
			return false
		}
	}
	return false
}

// Limits on digits: an integer of this length fits 64 bits, and a number with an
// exponent of this length is finite.
const (
	integerDigits  = 18
	fractionDigits = 40
	exponentDigits = 2
)

// integer consumes a 64-bit integer.
func (s *scanner) integer() bool {
	s.text(`-`)
	return s.digits(integerDigits, false)
}

// number consumes a finite number.
func (s *scanner) number() bool {
	if !s.integer() || s.text(`.`) && !s.digits(fractionDigits, true) {
		return false
	}
	if !s.text(`e`) && !s.text(`E`) {
		return true
	}
	if !s.text(`+`) {
		s.text(`-`)
	}
	return s.digits(exponentDigits, true)
}

// digits consumes between one and most digits.
func (s *scanner) digits(most int, zeros bool) bool {
	n := 0
	for n < len(s.rest) && '0' <= s.rest[n] && s.rest[n] <= '9' {
		n++
	}
	if n == 0 || n > most || !zeros && n > 1 && s.rest[0] == '0' {
		return false
	}
	s.rest = s.rest[n:]
	return true
}
