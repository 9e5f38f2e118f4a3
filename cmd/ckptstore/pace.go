package main

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/console"
)

// pacer gives events the distances in time that they had when the log stored
// them, divided by speed. The zero pacer waits for nothing.
type pacer struct {
	speed float64 // 0: as fast as it goes

	first time.Time // when the first event was stored
	begun time.Time // when it was replayed
}

// parseSpeed reads instant, original, or how many times as fast: "10x".
func parseSpeed(text string) (*pacer, error) {
	switch text {
	case "instant":
		return &pacer{}, nil
	case "original":
		return &pacer{speed: 1}, nil
	}
	factor, ok := strings.CutSuffix(text, "x")
	speed, err := strconv.ParseFloat(factor, 64)
	// Beyond these bounds a wait would not fit a duration.
	if !ok || err != nil || !(speed >= 1e-3 && speed <= 1e9) {
		return nil, console.Usagef("--speed %q: want instant, original, or how many times as fast, such as 10x or 0.5x", text)
	}
	return &pacer{speed: speed}, nil
}

// wait returns when an event that was stored then is due, or when ctx ends.
// Every wait is counted from the first, so that delays do not add up; a clock
// that was set back makes no wait.
func (p *pacer) wait(ctx context.Context, stored time.Time) error {
	if p.speed == 0 {
		return ctx.Err()
	}
	if p.begun.IsZero() {
		p.first, p.begun = stored, time.Now()
	}
	after := time.Duration(float64(stored.Sub(p.first)) / p.speed)
	timer := time.NewTimer(time.Until(p.begun.Add(after)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
