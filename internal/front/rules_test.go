package front

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"strings"
	"testing"
)

func TestParseHeader(t *testing.T) {
	for block, want := range map[string]string{
		"NATS/1.0\r\n\r\n":                                 "",
		"NATS/1.0\r\nA: b\r\nC:d\r\n\r\n":                  "A=b C=d",
		"NATS/1.0\r\nA: b:c \r\n\r\n":                      "A=b:c",
		"NATS/1.0\r\nA: b\r\nA: c\r\n\r\n":                 "repeated",
		"NATS/1.0\r\nA: b\r\na: c\r\n\r\n":                 "repeated",
		"NATS/1.0\r\nA: b\r\n C: folded\r\n\r\n":           "header line",
		"NATS/1.0\r\nA : b\r\n\r\n":                        "header line",
		"NATS/1.0\r\nA: b\nNats-Rollup: all\r\n\r\n":       "cannot hold",
		"NATS/1.0\r\nA: b\rNats-Rollup: all\r\n\r\n":       "cannot hold",
		"NATS/1.0\r\nA: \x00\r\n\r\n":                      "cannot hold",
		"NATS/1.0\r\nA: b\r\n":                             "do not end",
		"NATS/1.0\r\nA: b\r\n\r\nNats-Rollup: all\r\n\r\n": "before their size",
		"NATS/1.0 503\r\n\r\n":                             "begin with",
		"nonsense":                                         "begin with",
		"NATS/1.0\r\nnocolon\r\n\r\n":                      "header line",
	} {
		h, err := parseHeader([]byte(block), nil)
		var got []string
		for _, f := range h {
			got = append(got, f.name+"="+f.value)
		}
		if err != nil && (want == "" || !strings.Contains(err.Error(), want)) || err == nil && strings.Join(got, " ") != want {
			t.Errorf("%q: %v, %v, want %q", block, got, err, want)
		}
	}
}

func TestInboxOf(t *testing.T) {
	const id = "0123456789abcdef"
	for subject, want := range map[string][2]bool{ // as it is, and with patterns
		inbox + id:                   {true, true},
		inbox + id + ".x":            {true, true},
		inbox + id + ".*":            {false, true},
		inbox + id + ".x.>":          {false, true},
		inbox + id + ".>.x":          {false, false},
		inbox + id + ".":             {false, false},
		inbox + "short.x":            {false, false},
		inbox + "*":                  {false, false},
		inbox + ">":                  {false, false},
		inbox + "0123456789abcde*.x": {false, false},
		"_INBOX":                     {false, false},
		">":                          {false, false},
		"ckpt.>":                     {false, false},
	} {
		_, plain := inboxOf(subject, false)
		_, patterns := inboxOf(subject, true)
		if plain != want[0] || patterns != want[1] {
			t.Errorf("%s: %v and %v, want %v", subject, plain, patterns, want)
		}
	}
}

func TestMatches(t *testing.T) {
	for _, tc := range []struct {
		pattern, subject string
		want             bool
	}{
		{"a.b", "a.b", true},
		{"a.*", "a.b", true},
		{"a.>", "a.b.c", true},
		{"a.*", "a.b.c", false},
		{"a.b.c", "a.b", false},
		{"a", "a.b", false},
		{"*.b", "a.b", true},
		{"a.>", "a", false},
	} {
		if got := matches(tc.pattern, tc.subject); got != tc.want {
			t.Errorf("%s under %s: %v", tc.subject, tc.pattern, got)
		}
	}
}

// A certificate's name cannot pass for another kind of principal, or contain what
// a header cannot.
func TestOfCertificate(t *testing.T) {
	for _, tc := range []struct {
		c    x509.Certificate
		want string
	}{
		{x509.Certificate{Subject: pkix.Name{CommonName: "alice"}}, "cert:alice"},
		{x509.Certificate{Subject: pkix.Name{CommonName: "Alice Smith"}, DNSNames: []string{"node"}}, "cert:Alice Smith"},
		{x509.Certificate{DNSNames: []string{"node-1"}}, "cert:node-1"},
		{x509.Certificate{EmailAddresses: []string{"a@b"}}, "cert:a@b"},
		{x509.Certificate{Subject: pkix.Name{CommonName: "a\r\nckpt-actor: admin"}}, "cert:sha256:"},
		{x509.Certificate{Subject: pkix.Name{CommonName: "sha256:0"}}, "cert:sha256:e3b0"},
		{x509.Certificate{Subject: pkix.Name{CommonName: strings.Repeat("a", 65)}}, "cert:sha256:"},
		{x509.Certificate{}, "cert:sha256:"},
	} {
		got := ofCertificate(&tc.c)
		if !strings.HasPrefix(got.Name, tc.want) || !strings.Contains(tc.want, "sha256") && got.Name != tc.want || !got.Personal || !headerValue(got.Name) {
			t.Errorf("%+v is %+v, want %s", tc.c.Subject, got, tc.want)
		}
	}
}
