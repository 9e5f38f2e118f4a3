package events

import "errors"

// CheckBody says why the body is none of its kind, as [Event.Body] would, without
// building it.
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

// plainMetrics reports whether a body is one of report.metrics in the form in which
// [NewFact] writes it, with values that are no containers: most of any log. Of any other
// body it knows nothing. encoding/json takes ten times as long to say the same, which
// was most of what an owner spends on an event of a client.
func plainMetrics(body []byte) bool {
	s := scanner{body}
	return s.text(`{"attempt":`) && s.integer() &&
		s.text(`,"iteration":`) && s.integer() &&
		s.text(`,"step":`) && s.integer() &&
		s.text(`,"metrics":{`) && s.members() &&
		s.others() &&
		s.text(`,"time_this_iter_s":`) && s.number() &&
		s.text(`}`) && len(s.rest) == 0
}

// scanner takes what it knows from the front of a JSON text. After a false of any
// method but text, what is left of it means nothing.
type scanner struct{ rest []byte }

func (s *scanner) text(want string) bool {
	if len(s.rest) < len(want) || string(s.rest[:len(want)]) != want {
		return false
	}
	s.rest = s.rest[len(want):]
	return true
}

// others takes what other ranks reported, if that is there.
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

// members takes the members of an object and its end.
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

// value takes a value that is no container.
func (s *scanner) value() bool {
	if s.text(`true`) || s.text(`false`) || s.text(`null`) {
		return true
	}
	if len(s.rest) > 0 && s.rest[0] == '"' {
		return s.plainString()
	}
	return s.number()
}

// plainString takes a string of printable ASCII without escapes.
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

// Most digits that are taken: an integer of so many fits 64 bits, and a number of so
// many with such an exponent is finite.
const (
	integerDigits  = 18
	fractionDigits = 40
	exponentDigits = 2
)

// integer takes an integer of 64 bits.
func (s *scanner) integer() bool {
	s.text(`-`)
	return s.digits(integerDigits, false)
}

// number takes a finite number.
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

// digits takes at least one digit, and no more than so many.
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
