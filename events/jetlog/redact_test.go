package jetlog

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

func TestRedacted(t *testing.T) {
	for urls, want := range map[string]string{
		"nats://host:4222":                     "nats://host:4222",
		"nats://me:secret@host:4222":           "nats://xxxxx@host:4222",
		"tls://secret@host":                    "tls://xxxxx@host",
		"secret@host:1":                        "nats://xxxxx@host:1",
		"nats://a:secret@b:1,nats://secret@d":  "nats://xxxxx@b:1,nats://xxxxx@d",
		"nats://a:1, nats://x:secret@b:2":      "nats://a:1,nats://xxxxx@b:2",
		"nats://me:secret@host:port":           "a URL that cannot be read",
		"nats://secret@a:1,nats://b:secret@%z": "nats://xxxxx@a:1,a URL that cannot be read",
		"s3:secret":                            "a URL that cannot be read",
		"nats://h:1/?token=secret":             "nats://h:1",
	} {
		if got := Redacted(urls); got != want {
			t.Errorf("%s is shown as %s", urls, got)
		}
	}
}

// Neither errors nor log messages contain a password or a token.
func TestSecretsAreNotSaid(t *testing.T) {
	for _, urls := range []string{
		"nats://secret@127.0.0.1:1",
		"nats://me:secret@127.0.0.1:1,nats://secret@127.0.0.1:2",
		"nats://127.0.0.1:1,nats://secret@127.0.0.1:2",
		"nats://me:secret@host:port",
		"nats://me:sec%ret@127.0.0.1:1",
	} {
		var said bytes.Buffer
		l, err := Connect(t.Context(), Options{URL: urls, Logger: slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelDebug}))})
		if err == nil {
			l.Close()
			t.Fatal("connected")
		}
		if text := err.Error() + said.String(); strings.Contains(text, "secret") || strings.Contains(text, "sec%ret") {
			t.Errorf("%s: %s", urls, text)
		}
	}
}
