package client

import (
	"context"
	"fmt"
)

// ReportLast is [Client.Report], and says that the training has finished: the
// iteration counts, and a report of this rank after it is refused.
func (c *Client) ReportLast(ctx context.Context, step int64, metrics map[string]any) error {
	return c.report(ctx, step, metrics, true)
}

func (c *Client) report(ctx context.Context, step int64, metrics map[string]any, last bool) error {
	metrics, err := c.enc.apply(metrics)
	if err != nil {
		return fmt.Errorf("report: encode the metrics of step %d: %w", step, err)
	}
	safe := make(map[string]any, len(metrics))
	for k, v := range metrics {
		safe[k] = finite(v)
	}
	var reply ReportReply
	err = c.call(ctx, "report", Report{Step: step, Metrics: safe, Done: last}, &reply)
	if err == nil {
		c.heard(reply.Stop)
	}
	return err
}
