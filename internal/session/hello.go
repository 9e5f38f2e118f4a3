package session

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// held blocks a hello until training has started, if the backend wants that.
func (g *Group) held(ctx context.Context) error {
	var begun <-chan struct{}
	if g.Hooks != nil {
		begun = g.Hooks.Begun()
	}
	if begun == nil {
		return nil
	}
	timer := time.NewTimer(g.cfg.Collective)
	defer timer.Stop()
	select {
	case <-begun:
		return nil
	case <-g.work.Done():
		return &problem{http.StatusGone, errors.New("the attempt is over before training has started")}
	case <-timer.C:
		return &problem{http.StatusConflict, fmt.Errorf("the backend lets nobody start before all %d ranks have said hello, and they have not within %v: every rank must connect to the trainer", g.cfg.World(), g.cfg.Collective)}
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fetch returns the metrics of a report as the backend decodes them.
func (g *Group) fetch(metrics map[string]any) (map[string]any, error) {
	if g.Hooks == nil {
		return metrics, nil
	}
	return g.Hooks.Fetch(metrics)
}

// listens notes that a rank reports, or asks whether to stop.
func (g *Group) listens() {
	if g.Orders != nil {
		g.Orders.Listens()
	}
}
