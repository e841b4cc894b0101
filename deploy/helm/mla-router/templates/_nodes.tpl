{{/* Workers on several nodes: one group of pods for each copy of the model. Only node 0 of a group serves. */}}
{{- define "mla.nodes" }}
{{- $worker := .Values.worker }}
{{- if mod $worker.tpSize $worker.nodes }}
{{- fail (printf "worker.nodes %v must divide worker.tpSize %v" $worker.nodes $worker.tpSize) }}
{{- end }}
{{- if eq .Values.modelCache.kind "perWorker" }}
{{- fail "worker.nodes above 1 needs modelCache.kind shared or none: the pods of a group have no volumes of their own" }}
{{- end }}
{{- if .Values.autoscaling.enabled }}
{{- fail "worker.nodes above 1: the autoscaler is for StatefulSets; set autoscaling.enabled to false" }}
{{- end }}
{{- $arguments := list "--nnodes=$(LWS_GROUP_SIZE)" "--node-rank=$(LWS_WORKER_INDEX)" "--dist-init-addr=$(LWS_LEADER_ADDRESS):5000" }}
{{- $pod := dict "root" . "gpus" (div $worker.tpSize $worker.nodes) "arguments" $arguments }}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ include "mla.name" . }}-worker
  labels: {{- include "mla.labels" (dict "root" . "component" "worker") | nindent 4 }}
spec:
  replicas: {{ $worker.replicas }}
  startupPolicy: LeaderCreated
  leaderWorkerTemplate:
    size: {{ $worker.nodes }}
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate: {{- include "mla.workerPod" (merge (dict "component" "worker") $pod) | trim | nindent 6 }}
    workerTemplate: {{- include "mla.workerPod" (merge (dict "component" "node") $pod) | trim | nindent 6 }}
{{- end }}
