package front

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

// FuzzFrames checks that the reader returns frames within the limits for any
// input, and that frames encoded for the server are read back unchanged.
func FuzzFrames(f *testing.F) {
	for _, text := range []string{
		"CONNECT {\"auth_token\":\"x\"}\r\nPING\r\nPONG\r\n",
		"PUB a.b 3\r\nabc\r\n",
		"PUB a.b _INBOX.x.y 0\r\n\r\n",
		"HPUB a _INBOX.x 22 24\r\nNATS/1.0\r\nA: b\r\nC:d\r\n\r\n12\r\n",
		"SUB _INBOX.0123456789abcdef.* 1\r\nSUB a q 2\r\nUNSUB 1 5\r\nUNSUB 2\r\n",
		"HPUB a 12 12\r\nNATS/1.0\r\n\r\n\r\n",
		"pub\ta\t1\r\nx\r\n",
		"PUB a 999999999\r\n", "PUB a -1\r\n", "PUB a 2\r\nabcd\r\n", "MSG a 1 0\r\n\r\n", "PING\n", strings.Repeat("x", 5000),
	} {
		f.Add([]byte(text))
	}
	limits, err := Limits{Line: 256, Subject: 64, Header: 256, Payload: 1024, Batch: 2048}.withDefaults()
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		r := newReader(bytes.NewReader(text), limits)
		for {
			fr, err := r.next()
			if err != nil {
				var protocol protocolError
				if !errors.As(err, &protocol) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Fatalf("%q: %v", text, err)
				}
				return
			}
			if len(fr.header)+len(fr.payload) > limits.Payload || len(fr.header) > limits.Header || len(fr.subject) > limits.Subject || len(fr.reply) > limits.Subject {
				t.Fatalf("a frame beyond the limits: %+v", fr)
			}
			if fr.op != opPub {
				continue
			}
			var h header
			if fr.header != nil {
				if h, err = parseHeader(fr.header, nil); err != nil {
					continue
				}
			}
			wire := appendPub(nil, fr.subject, fr.reply, h, fr.payload)
			back, err := newReader(bytes.NewReader(wire), Limits{Line: 512, Subject: 64, Header: 4096, Payload: 8192}).next()
			if err != nil || back.subject != fr.subject || back.reply != fr.reply || !bytes.Equal(back.payload, fr.payload) || (back.header == nil) != (h == nil) {
				t.Fatalf("%q is written as %q, which is read as %+v, %v", text, wire, back, err)
			}
			if h == nil {
				continue
			}
			again, err := parseHeader(back.header, nil)
			if err != nil || len(again) != len(h) {
				t.Fatalf("headers %+v are written as %q, and read as %+v, %v", h, back.header, again, err)
			}
			for i := range h {
				if again[i] != h[i] {
					t.Fatalf("header %+v is read back as %+v", h[i], again[i])
				}
			}
		}
	})
}
