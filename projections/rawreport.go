package projections

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
	"time"
)

// rawReport holds what rollups and points need of a report's row. Reading it takes a tenth of
// the time of [decodeReport]: most rows have one known form, and any other is decoded as JSON.
// Both ways give the same.
type rawReport struct {
	sequence uint64
	time     []byte // in RFC 3339
	step     int64
	seconds  float64
	values   []rawValue // sorted by name
}

// rawValue is the value of a metric.
type rawValue struct {
	name   []byte
	value  float64
	number bool // otherwise it is a string, a boolean or null
}

// read reads a row. The result refers to the row, and is valid until the next read.
func (r *rawReport) read(row []byte) error {
	r.values = r.values[:0]
	if r.plain(row) {
		return nil
	}
	var stored reportRow
	if err := decode(nil, row, &stored); err != nil {
		return err
	}
	report, err := stored.report(nil)
	if err != nil {
		return err
	}
	r.sequence, r.step, r.seconds = stored.Sequence, report.Step, report.Seconds
	r.time = stored.Time.AppendFormat(nil, time.RFC3339Nano)
	r.values = r.values[:0]
	for _, name := range sortedNames(report.Metrics) {
		v, number := asNumber(report.Metrics[name])
		r.values = append(r.values, rawValue{[]byte(name), v, number})
	}
	return nil
}

// plain reads a row whose report has the members of [events.Metrics] in their order and
// scalar metrics with plain names, as the trainer writes it. It reports whether the row is
// of that form.
func (r *rawReport) plain(row []byte) bool {
	s := rowScanner{row}
	ok := s.text(`{"sequence":`) && s.unsigned(&r.sequence) &&
		s.text(`,"time":"`) && s.until('"', &r.time) &&
		s.text(`,"report":{"attempt":`) && s.integer(nil) &&
		s.text(`,"iteration":`) && s.integer(nil) &&
		s.text(`,"step":`) && s.integer(&r.step) &&
		s.text(`,"metrics":{`) && s.members(&r.values) &&
		(!s.text(`,"others":`) || s.array()) &&
		(!s.text(`,"summary":`) || s.array()) &&
		s.text(`,"time_this_iter_s":`) && s.number(&r.seconds) &&
		(!s.text(`,"slowest":{"rank":`) || s.integer(nil) && s.text(`,"late_s":`) && s.number(new(float64)) && s.text(`}`)) &&
		s.text(`}}`) && len(s.rest) == 0
	if !ok {
		return false
	}
	byName := func(a, b rawValue) int { return bytes.Compare(a.name, b.name) }
	if !slices.IsSortedFunc(r.values, byName) {
		slices.SortFunc(r.values, byName)
	}
	for i := 1; i < len(r.values); i++ {
		if bytes.Equal(r.values[i-1].name, r.values[i].name) {
			return false // JSON's last one counts
		}
	}
	return true
}

// rowScanner consumes known parts from the front of a row, which is valid JSON. After any
// method except text has returned false, the rest is meaningless.
type rowScanner struct{ rest []byte }

func (s *rowScanner) text(want string) bool {
	if len(s.rest) < len(want) || string(s.rest[:len(want)]) != want {
		return false
	}
	s.rest = s.rest[len(want):]
	return true
}

// until takes a string without escapes, up to the byte that ends it.
func (s *rowScanner) until(end byte, to *[]byte) bool {
	for i, c := range s.rest {
		switch {
		case c == end:
			*to, s.rest = s.rest[:i:i], s.rest[i+1:]
			return true
		case c < ' ' || c > '~' || c == '\\':
			return false
		}
	}
	return false
}

// digits takes the characters of a number.
func (s *rowScanner) digits() []byte {
	n := 0
	for n < len(s.rest) && ('0' <= s.rest[n] && s.rest[n] <= '9' || strings.IndexByte("-+.eE", s.rest[n]) >= 0) {
		n++
	}
	text := s.rest[:n]
	s.rest = s.rest[n:]
	return text
}

func (s *rowScanner) unsigned(to *uint64) bool {
	v, err := strconv.ParseUint(string(s.digits()), 10, 64)
	*to = v
	return err == nil
}

func (s *rowScanner) integer(to *int64) bool {
	text := s.digits()
	if to == nil {
		return len(text) > 0
	}
	v, err := strconv.ParseInt(string(text), 10, 64)
	*to = v
	return err == nil
}

func (s *rowScanner) number(to *float64) bool {
	v, err := strconv.ParseFloat(string(s.digits()), 64)
	*to = v
	return err == nil
}

// members takes the members of an object and its end.
func (s *rowScanner) members(to *[]rawValue) bool {
	if s.text(`}`) {
		return true
	}
	for {
		var v rawValue
		if !s.text(`"`) || !s.until('"', &v.name) || !s.text(`:`) || !s.value(&v) {
			return false
		}
		*to = append(*to, v)
		if s.text(`}`) {
			return true
		}
		if !s.text(`,`) {
			return false
		}
	}
}

// value takes a scalar value.
func (s *rowScanner) value(v *rawValue) bool {
	if s.text(`true`) || s.text(`false`) || s.text(`null`) {
		return true
	}
	if s.text(`"`) {
		var text []byte
		if !s.until('"', &text) {
			return false
		}
		v.value, v.number = nonFinite[string(text)]
		return true
	}
	v.number = true
	return s.number(&v.value)
}

// array takes an array of anything.
func (s *rowScanner) array() bool {
	if len(s.rest) == 0 || s.rest[0] != '[' {
		return false
	}
	depth, quoted := 0, false
	for i := 0; i < len(s.rest); i++ {
		switch c := s.rest[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '[' || c == '{':
			depth++
		case c == ']' || c == '}':
			if depth--; depth == 0 {
				s.rest = s.rest[i+1:]
				return true
			}
		}
	}
	return false
}
