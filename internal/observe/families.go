package observe

import (
	"github.com/prometheus/client_golang/prometheus"
)

// prefix starts the name of every metric.
const prefix = "ckptstore_"

// family is one metric that /metrics serves.
type family struct {
	name   string // without the prefix
	kind   string // gauge, counter, histogram or summary
	labels []string
	help   string
}

// desc returns the description of the family for the client library.
func (f family) desc() *prometheus.Desc {
	return prometheus.NewDesc(prefix+f.name, f.help, f.labels, nil)
}

// The metrics. Times are those of the log's events, in seconds since 1970.
var (
	buildInfo = family{"build_info", "gauge", []string{"version"}, "1, with the version of the program."}
	storeInfo = family{"store_info", "gauge", []string{"store"}, "1, with the ID of the store."}
	owner     = family{"owner", "gauge", nil, "1 if this process owns the store, or follows a log on a server. A process that stands by serves none of the metrics below but log_last_sequence."}

	tracesSent    = family{"traces_sent_total", "counter", nil, "Traces that the collector has taken, since the start of this process. With --traces only, as the next two."}
	tracesWaiting = family{"traces_waiting", "gauge", nil, "Traces that wait for the collector."}
	tracesDropped = family{"traces_dropped_total", "counter", []string{"reason"}, "Traces that the collector does not get, since the start of this process: full, newer ones took their place in the queue; refused; old, the save ended over an hour before; unread, its rows were not readable."}

	logLast        = family{"log_last_sequence", "gauge", nil, "Sequence of the last event in the log."}
	viewsLag       = family{"views_lag_events", "gauge", nil, "Events of the log that the views do not contain yet."}
	viewsHalted    = family{"views_halted", "gauge", nil, "1 if the views no longer follow the log: queries fail."}
	scrubSequence  = family{"scrub_sequence", "gauge", nil, "Last event of the newest reading of the whole log without findings."}
	scrubFindings  = family{"scrub_findings", "gauge", nil, "Findings of the newest reading of the whole log."}
	diskFree       = family{"disk_free_bytes", "gauge", []string{"volume"}, "Free space of the disk with the log, or with the data if that is elsewhere."}
	diskSize       = family{"disk_size_bytes", "gauge", []string{"volume"}, "Size of that disk."}
	cursorLag      = family{"cursor_lag_events", "gauge", []string{"cursor"}, "Events of the log behind a subscriber's cursor."}
	gpuUnhealthy   = family{"gpu_unhealthy", "gauge", []string{"node", "device"}, "1 for a GPU that a listed run has reported as unhealthy and that has not recovered."}
	complete       = family{"metrics_complete", "gauge", nil, "0 if the runs or the cursors could not be read in time: their metrics are then missing."}
	runsOmitted    = family{"metrics_runs_omitted", "gauge", nil, "Runs that are live or were in the last hour, and are not listed because there are too many."}
	runState       = family{"run_state", "gauge", []string{"run", "state"}, "1 for the state of the run's newest job: running, stopping, ended or lost."}
	runStep        = family{"run_step", "gauge", []string{"run"}, "Step of the newest report."}
	runLastReport  = family{"run_last_report_timestamp_seconds", "gauge", []string{"run"}, "Time of the newest report."}
	runJobStarted  = family{"run_job_started_timestamp_seconds", "gauge", []string{"run"}, "Time at which the run's newest job started."}
	nodeSlow       = family{"node_slow", "gauge", []string{"run", "node"}, "1 for a node that is slower than the other nodes of the run's group: by the ranks' own work in iterations, or their copies in saves."}
	runLastCommit  = family{"run_last_commit_timestamp_seconds", "gauge", []string{"run"}, "Time of the newest commit."}
	commitInterval = family{"run_commit_interval_seconds", "gauge", []string{"run"}, "Usual time between two commits of an attempt: the median of the newest eight."}
	stepsAtRisk    = family{"run_steps_at_risk", "gauge", []string{"run"}, "Steps that the next attempt would repeat if the run was killed now."}
	runTime        = family{"run_time_seconds", "gauge", []string{"run", "use"}, "Time of the run's attempts by its use: training that is kept or lost, restoring, blocked by saves, other. A resume moves time from kept to lost, so this is no counter: compare the uses with each other."}
	saves          = family{"saves_total", "counter", []string{"run", "result"}, "Saves that were committed or aborted."}
	savesInFlight  = family{"saves_in_flight", "gauge", []string{"run"}, "Saves that have begun and not ended."}
	saveDuration   = family{"save_duration_seconds", "histogram", []string{"run", "phase"}, "Duration of committed saves: blocked, what they held up the training, at most; staged, from their begin until all ranks had sealed; total, from their begin to the commit. The exemplar of total is the newest save."}
	saveBytes      = family{"save_bytes_total", "counter", []string{"run", "kind"}, "Bytes of committed saves that were written, and that were reused from earlier ones."}
	slowestRank    = family{"save_slowest_rank", "gauge", []string{"run"}, "Rank whose copy and write took longest in the newest committed save."}
	slowestNode    = family{"save_slowest_node", "gauge", []string{"run"}, "Node of that rank."}
	restores       = family{"restores_total", "counter", []string{"run", "tier", "result"}, "Loads that ended, by the source of their bytes: slots of shared memory, peers, files; none for a load that failed."}
	restoreTime    = family{"restore_duration_seconds", "summary", []string{"run", "tier"}, "Duration of loads that succeeded."}
	attempts       = family{"attempts_total", "counter", []string{"run", "failure"}, "Attempts that ended, by what their failure is charged to: none, worker, infrastructure, preemption; lost if their trainer recorded no end."}
)

// families lists the metrics in the order of the reference page.
func families() []family {
	list := []family{buildInfo, storeInfo, tracesSent, tracesWaiting, tracesDropped, owner}
	list = append(list, ofStore()...)
	return append(list, ofRuns()...)
}

func ofStore() []family {
	return []family{
		logLast, viewsLag, viewsHalted, scrubSequence, scrubFindings, diskFree, diskSize, cursorLag, gpuUnhealthy, complete, runsOmitted,
	}
}

func ofRuns() []family {
	return []family{
		runState, runJobStarted, nodeSlow, runStep, runLastReport, runLastCommit, commitInterval, stepsAtRisk, runTime, saves, savesInFlight,
		saveDuration, saveBytes, slowestRank, slowestNode, restores, restoreTime, attempts,
	}
}
