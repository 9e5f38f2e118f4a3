package main

import (
	"bytes"
	"context"
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out bytes.Buffer
	if err := run(ctx, []string{"--target", "http://127.0.0.1:1", "--rate", "1000", "--refused", "0.5", "--fault", "flip-put"}, &out); err != nil {
		t.Error(err)
	}
	if text := out.String(); !strings.HasPrefix(text, "http://127.0.0.1:") || !strings.Contains(text, "all: 0 connections") {
		t.Error(text)
	}
	for _, args := range [][]string{{"--target", "https://host"}, {"--refused", "2"}, {"--fault", "flip"}, {"argument"}} {
		if err := run(ctx, args, &out); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
}
