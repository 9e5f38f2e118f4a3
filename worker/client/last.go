package client

import "context"

// ReportLast is [Client.Report], and says that the training has finished: the
// iteration counts, and a report of this rank after it is refused.
func (c *Client) ReportLast(ctx context.Context, step int64, metrics map[string]any) error {
	safe := make(map[string]any, len(metrics))
	for k, v := range metrics {
		safe[k] = finite(v)
	}
	return c.call(ctx, "report", Report{Step: step, Metrics: safe, Done: true}, nil)
}
